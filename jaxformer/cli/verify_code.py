"""``jaxformer verify --torch … --jax …``: two models that are made by people's own code."""

import contextlib
import importlib
import inspect
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxformer.cli.arguments import Switch, parse
from jaxformer.cli.verify_outputs import (
    check_files,
    check_names,
    exit_code,
    print_files,
    print_worst,
    write_files,
)
from jaxformer.errors import JaxformerError, TextError, UsageError, is_out_of_memory, suggest


@dataclass(frozen=True, kw_only=True)
class VerifyCodeOptions:
    """Run two models made by your own code, and name the first line where they differ.

    The named functions are imported from the working folder or an installed package, and called;
    no other code is. Exit code 0: the models are equal, up to rounding. 1: there is a bug, and the
    output says where. 11: a part was not compared.
    """

    torch: str
    """The reference: "package.module:function", which returns a PyTorch module."""
    jax: str
    """The candidate: "package.module:function", which returns an NNX or Equinox module,
    (Linen module, variables) or (function, parameters). If it takes an argument, it is given the
    reference."""
    inputs: Path
    """An .npz file with the inputs: in order if they are named arr_0, arr_1 …, else by name."""
    jax_inputs: Path | None = None
    """An .npz file with the inputs of the candidate, if they are others."""
    html: Path | None = None
    """Write the report to this file as a page for a browser."""
    json: Path | None = None
    """Write the report to this file as JSON."""
    against: Path | None = None
    """An earlier report (of --json); whatever got worse since then is an error too."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """A dtype whose rounding is measured too, beside float64."""
    no_backward: Switch = False
    """Compare the results alone, not the gradients."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, and use those that are there."""
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        check_names(self.html, self.json)


def run(arguments: Sequence[str]) -> int:
    """Compares two models and prints the report on standard output.

    Args:
        arguments: of the command line.

    Returns:
        The exit code: 0 if the two are equal up to rounding, 1 if there is a bug, or if something
        got worse since an earlier report, 11 if a part was not compared.

    Raises:
        UsageError: a function does not exist or raises, what it returns is no model, or a model
            fails on the inputs.
        TextError: an input file cannot be read.
        CheckpointError: the earlier report cannot be read.
        ResourceError: the report cannot be written.
    """
    options: VerifyCodeOptions = parse(VerifyCodeOptions, "jaxformer verify", arguments)
    check_files(options.html, options.json)
    inputs = _read_inputs(options.inputs)

    from jaxformer.hardware.compilation_cache import use_compilation_cache
    from jaxformer.hardware.screen import Screen
    from jaxformer.parity.comparison.operators import compare_operators
    from jaxformer.parity.report.files import load_report
    from jaxformer.parity.report.regressions import compare_reports

    use_compilation_cache(options.compilation_cache)
    before = None if options.against is None else load_report(options.against)
    jax_inputs = None if options.jax_inputs is None else _read_inputs(options.jax_inputs)
    sys.path.insert(0, str(Path.cwd()))
    try:
        reference = _make_reference(options.torch)
        candidate = _make_candidate(options.jax, reference)
    finally:
        sys.path.pop(0)
    _check_inputs(reference.forward, inputs, options.inputs)

    report = compare_operators(
        reference, candidate, inputs, jax_inputs, backward=not options.no_backward,
        dtype=options.dtype,
    )  # fmt: skip
    worse = [] if before is None else compare_reports(report, before)
    is_bug = report.verdict == "bug"
    console = Screen(highlight=False, soft_wrap=True)
    try:
        write_files(report, options.html, options.json)
    finally:
        # A full disk is no reason to lose what was found.
        files = {"json": options.json, "html": options.html}
        print_files(console, files, options.against, worse, is_bug)
        print(report)
        if worse and not is_bug:
            print_worst(console, options.against, worse)
    return exit_code(report, worse)


def _make_reference(name: str) -> Any:
    """Returns the PyTorch module that a function makes.

    Raises:
        UsageError: there is no such function, it raises, or it returns something else.
    """
    from jaxformer.parity.recording.torch_values import require_torch

    make = _function(name, "--torch")
    with _naming_errors(f"--torch {name}"):
        reference = make()
    if not isinstance(reference, require_torch().nn.Module):
        what = "None" if reference is None else f"an object of {type(reference).__name__}"
        raise UsageError(f"--torch {name} returned {what}, which is no torch.nn.Module")
    return reference


def _make_candidate(name: str, reference: Any) -> Any:
    """Returns what a function makes, given the reference if it takes an argument.

    Raises:
        UsageError: there is no such function, it raises, or it returns no model.
    """
    from jaxformer.parity.recording.operators.candidates import as_candidate, unwrapped

    make = _function(name, "--jax")
    with _naming_errors(f"--jax {name}"):
        candidate = make(reference) if _takes_argument(make) else make()
    try:
        as_candidate(unwrapped(candidate))
    except UsageError as error:
        raise UsageError(f"--jax {name}: ", *error.args) from error
    return candidate


@contextlib.contextmanager
def _naming_errors(what: str) -> Iterator[None]:
    """Makes an error of the user's code say which code that is.

    Raises:
        UsageError: the code raised an error which is neither jaxformer's own nor lack of memory, or
            ended the program.
    """
    from jaxformer.parity.words import name_error

    try:
        yield
    except JaxformerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(f"{what} raised {name_error(error)}") from error
    except SystemExit as error:
        # Its code would be taken for the verdict.
        raise UsageError(f"{what} ended the program: SystemExit({error.code!r})") from error


def _function(name: str, flag: str) -> Callable[..., Any]:
    """Imports a function by "module:name".

    Raises:
        UsageError: there is none, or its module cannot be imported.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise UsageError(f'{flag} must be "package.module:function": got {name}')
    with _naming_errors(f"{flag} {name}: the import of {module}"):
        try:
            found = getattr(importlib.import_module(module), function, None)
        except ModuleNotFoundError as error:
            raise UsageError(f"{flag} {name}: {error}") from error
    if not callable(found):
        known = [n for n, value in vars(sys.modules[module]).items() if callable(value)]
        meant = suggest(function, known)
        raise UsageError(f"{flag} {name}: {module} has no function {function}{meant}")
    return found


def _takes_argument(function: Callable[..., Any]) -> bool:
    required = (
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    )
    return any(True for _ in required)


def _check_inputs(forward: Callable[..., Any], inputs: Any, path: Path) -> None:
    """Checks that a model takes the inputs of a file, by their names or by their number.

    Raises:
        UsageError: it does not.
    """
    from jaxformer.parity.recording.operators.signatures import misfit

    args, kwargs = ([], inputs) if isinstance(inputs, dict) else (inputs, {})
    found = misfit(forward, args, kwargs)
    if found:
        signature = inspect.signature(forward)
        raise UsageError(f"{path} does not fit the reference's forward{signature}: {found}")


def _read_inputs(path: Path) -> Any:
    """Returns the arrays of a file: a list, or a dict where they have names.

    Raises:
        TextError: the file is missing or damaged, or no .npz file.
    """
    import numpy as np

    try:
        file = np.load(path, allow_pickle=False)
    except OSError as error:
        raise TextError(f"{path}: cannot be read as .npz: {error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile):
        file = None
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise TextError(f"{path} is no .npz file: save the inputs with numpy.savez")
    arrays = {}
    with file:
        for name in file.files:
            try:
                arrays[name] = file[name]
            except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                raise TextError(
                    f"{path}: the array {name} is damaged, or holds Python objects"
                ) from error
    ordered = [f"arr_{i}" for i in range(len(arrays))]
    if sorted(arrays) == sorted(ordered):
        return [arrays[name] for name in ordered]
    return arrays
