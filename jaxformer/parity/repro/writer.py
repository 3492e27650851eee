"""Writes a repro: chooses the innermost pair of modules that shows a bug, and writes its folder."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer.errors import ResourceError, UsageError
from jaxformer.parity.comparison.reference_run import Caller, ReferenceRun
from jaxformer.parity.judging.weights import find_wrong_weights
from jaxformer.parity.matching.pairs import TIED_HEAD, Pair
from jaxformer.parity.matching.positions import match_alibi_slopes, position_ids_from_mask
from jaxformer.parity.matching.reference_attention import ReferenceAttention
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.recording.torch_values import (
    everything_in_float64,
    in_float64,
    is_float,
    require_torch,
    tensor,
    without_fast_path,
)
from jaxformer.parity.report.files import write_text
from jaxformer.parity.repro.calls import RecordedCall, record_candidate, record_reference
from jaxformer.parity.repro.contents import Calls, ReproContents, can_be_shown
from jaxformer.parity.repro.rebuilding import candidate_recipe, reference_recipe
from jaxformer.parity.repro.runtime import FORMAT, Repro
from jaxformer.porting.formats.safetensors_files import write_safetensors
from jaxformer.porting.formats.tensors import StoredTensor

SCRIPT = '''\
"""{path}, in the reference {reference_path}: {message}

Run it with: python repro.py
Both modules get their own weights and the same inputs, in float64, from arrays.safetensors.
"""

from pathlib import Path

from jaxformer.parity.repro import Repro

repro = Repro(Path(__file__).parent)
{reference}
{candidate}
result = repro.run(reference, candidate)
print(result)
assert result.is_equal, "they differ by more than rounding"
'''
BUILD = "{side} = repro.build_{side}()  # {kind}, by the settings in node.json"
FILL_IN = """{side} = None  # FILL IN: a {kind}, built like yours; its weights are added below
assert {side} is not None, "fill in {side} in repro.py: {why}\""""


def write_repro(
    folder: str | Path,
    torch_module: Any,
    jax_module: Any,
    inputs: Sequence[Any],
    path: str,
    *,
    jax_inputs: Sequence[Any] | None = None,
    dialect: str | None = None,
    names: Mapping[str, str] | None = None,
    torch_call: Caller | None = None,
    jax_call: Caller | None = None,
    message: str = "",
    backward: bool = True,
) -> Repro:
    """Writes a folder that shows how one pair of modules differs, without the models around it.

    It holds ``repro.py``, a script of a few lines, ``node.json`` and ``arrays.safetensors``. The
    script builds models of transformers, torch_ref and jaxformer from their settings. For other
    models, and for those that were changed after they were built, it asks for the module. If a
    pair cannot run by itself (a position table, a tied head), the pair that encloses it is shown.

    Args:
        folder: is made; one that exists must be empty.
        torch_module: the whole reference.
        jax_module: the whole candidate.
        inputs: positional arguments of the reference.
        path: candidate's path of the node in the report.
        jax_inputs: see ``compare``.
        dialect: see ``compare``.
        names: see ``compare``.
        torch_call: see ``compare``.
        jax_call: see ``compare``.
        message: what is wrong, for the script.
        backward: whether to show gradients too.

    Raises:
        UsageError: there is no such node, the folder is in use, or an argument of the modules
            cannot be written.
        ResourceError: the folder cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists: give the name of a new folder")
    with jax.enable_x64(True), match_alibi_slopes(torch_module):
        reference = ReferenceRun(
            torch_module, inputs, dialect=dialect, names=names, backward=False, call=torch_call,
            config=jax_module,
        )  # fmt: skip
        given = reference.inputs if jax_inputs is None else jax_inputs
        candidate = jax_modules.in_dtype(jax_module, "float64")
        pairs = reference.pairs_with(jax_module)
        right = _record_reference(reference)
        counted = {} if jax_call else _counted_positions(reference, candidate, pairs)
        run = jax_call or (lambda module, given: module(*given, **counted))
        own = record_candidate(
            candidate, {p for pair in pairs for p in pair.candidate},
            lambda module: run(module, given),
        )  # fmt: skip
        pair = _choose_pair(path, reference, pairs, right, own)
        wrong = (
            {}
            if reference.plan is None
            else find_wrong_weights(jax_modules.parameters_of(jax_module), reference.plan.tensors)
        )
        contents = ReproContents(reference, pair, right, own, candidate, backward, wrong)
    made = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        _write_folder(contents, folder, message)
    except BaseException as error:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise ResourceError(f"could not write {folder}: {error.strerror or error}") from error
        raise
    return Repro(folder)


def _record_reference(reference: ReferenceRun) -> dict[str, RecordedCall]:
    """Returns the first calls of all modules of the reference in float64, by path."""
    wide = in_float64(reference.module)
    inputs = [tensor(x) if isinstance(x, np.ndarray) else x for x in reference.inputs]
    inputs = [x.double() if is_float(x) else x for x in inputs]
    with everything_in_float64(), without_fast_path(), require_torch().no_grad():
        return record_reference(
            wide, reference.modules.keys(), lambda: reference.call(wide, inputs)
        )


def _counted_positions(
    reference: ReferenceRun, candidate: Any, pairs: Sequence[Pair]
) -> dict[str, np.ndarray]:
    """Returns the argument ``positions`` of a candidate whose reference counts them by a mask."""
    watched = {path for pair in pairs for path in pair.reference}
    ran = reference.record(watched, lambda value: None)
    given = {
        path: calls[0].positions.data
        for path, calls in ran.calls.items()
        if calls[0].positions is not None
    }
    padding = ReferenceAttention(ran.softmaxes).padding
    return position_ids_from_mask(candidate, pairs, given, padding)


def _choose_pair(
    path: str,
    reference: ReferenceRun,
    pairs: Sequence[Pair],
    right: Calls,
    own: Calls,
) -> Pair:
    """Returns the pair of a node, or the innermost enclosing one that can run by itself."""
    known = {name for name, _ in reference.module.named_modules()}
    pairs = [
        pair
        for pair in pairs
        if pair.candidate != (TIED_HEAD,)
        and known.issuperset(pair.reference)
        and can_be_shown(pair, right, own)
    ]
    paths = path.split(" + ")
    enclosing = [
        pair
        for pair in pairs
        if pair.path == path
        or (
            len(pair.candidate) == 1
            and all(p.startswith(f"{pair.candidate[0]}.") or not pair.candidate[0] for p in paths)
        )
    ]
    if not enclosing:
        raise UsageError(f"there is no module {path} to show by itself")
    return max(enclosing, key=lambda pair: (pair.path == path, len(pair.candidate[0])))


def _write_folder(contents: ReproContents, folder: Path, message: str) -> None:
    """Writes the three files of a repro."""
    pair = contents.pair
    recipes = {
        "reference": reference_recipe(
            contents.reference.module, pair, contents.reference_calls, contents.arrays
        ),
        "candidate": candidate_recipe(contents.candidate, pair),
    }
    about = {
        "format": FORMAT,
        "message": message,
        "backward": contents.backward,
        "groups": contents.groups,
        "reference": {**recipes["reference"], "calls": contents.reference_calls},
        "candidate": {**recipes["candidate"], "calls": contents.candidate_calls},
    }
    stored = {
        name: StoredTensor.of(np.ascontiguousarray(array))
        for name, array in contents.arrays.items()
    }
    write_safetensors(folder / "arrays.safetensors", stored)
    write_text(folder / "node.json", json.dumps(about, indent=1) + "\n")
    modules = {
        "reference": contents.reference.module.get_submodule(pair.reference[0]),
        "candidate": jax_modules.resolve(contents.candidate, pair.candidate[0])[0],
    }
    lines = {
        side: (BUILD if recipe["class"] else FILL_IN).format(
            side=side, kind=type(modules[side]).__name__, why=recipe.get("why", "")
        )
        for side, recipe in recipes.items()
    }
    script = SCRIPT.format(
        path=pair.path or "the whole model",
        reference_path=pair.reference_path or "the whole model",
        message=message.replace("\\", "/").replace('"', "'") or "see what it prints",
        **lines,
    )
    write_text(folder / "repro.py", script)
