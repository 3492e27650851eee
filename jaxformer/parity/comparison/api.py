"""``compare`` and ``assert_parity``: one call for every kind of candidate."""

from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from jaxformer.errors import UsageError
from jaxformer.parity.comparison import modules
from jaxformer.parity.comparison.operators import compare_operators
from jaxformer.parity.recording.operators.candidates import Caller, arguments, unwrapped
from jaxformer.parity.recording.operators.failures import naming_failures
from jaxformer.parity.recording.operators.references import check_reference, unwrapped_reference
from jaxformer.parity.recording.operators.signatures import naming_misfits
from jaxformer.parity.recording.operators.torch_run import raised_alone
from jaxformer.parity.recording.torch_values import experts_one_by_one, require_torch
from jaxformer.parity.report.report import Report
from jaxformer.porting.arguments import check_options
from jaxformer.porting.dialects import UnknownDialectError

# Of the comparison operator by operator.
OPTIONS = ("backward", "names", "torch_call", "jax_call", "about", "dtype")
# Of jaxformer's own models alone.
OWN_OPTIONS = ("dialect", "force")


def compare(
    torch_module: Any,
    candidate: Any = None,
    inputs: Any = (),
    jax_inputs: Any = None,
    **options: Any,
) -> Report:
    """Runs two models on the same inputs and says where, and why, they differ.

    Of jaxformer's own models, whose modules are those of the reference, a segment is a pair of
    modules: see ``jaxformer.parity.comparison.modules``. A wrong pair, any other candidate, and a
    reference that no dialect knows, is compared operator by operator, with no names given: see
    ``jaxformer.parity.comparison.operators``. Both are the pipeline of ``jaxformer.parity``.

    Args:
        torch_module: the reference; it is not changed.
        candidate: an NNX or Equinox module, (Linen module, variables), what Haiku's ``transform``
            gives with its parameters, or (function, parameters). Default: what ``from_torch`` makes
            of the reference.
        inputs: of the reference: an array, a list of positional arguments, or a dict of named ones.
            Arrays of numpy, PyTorch and JAX are taken.
        jax_inputs: of the candidate, where they differ; default the same.
        options: ``backward`` (whether gradients are compared too; default True), ``torch_call`` and
            ``jax_call`` (how each side is called, given it and its inputs), ``dtype`` (whose
            rounding is measured too, beside float64), ``about`` (notes for the report); of
            jaxformer's own models ``dialect`` and ``force``; of any other NNX module ``names`` (its
            module paths to those of the reference, which the report then shows; default those that
            are found by their numbers).

    Returns:
        the report; ``verdict`` and ``root_causes`` are there for every kind of candidate.

    Raises:
        UsageError: torch is missing, the reference or the candidate is of no known kind, an option
            does not serve it, or a model fails on its inputs.
        CheckpointError: the reference's arrays are not those of its dialect; all are listed.
        ValueError: names has a path that does not exist; all such paths are listed.
    """
    known = ("jax_inputs", *OPTIONS, *OWN_OPTIONS)
    check_options("compare", options, known)
    if not isinstance(torch_module, require_torch().nn.Module):
        raise UsageError(
            f"the reference must be a torch.nn.Module: got {type(torch_module).__name__}"
        )
    if options.get("torch_call") is None:
        torch_module = unwrapped_reference(torch_module)
    check_reference(torch_module)
    candidate = unwrapped(candidate)
    named = options.get("names") is not None
    if named and not isinstance(candidate, nnx.Module):
        raise UsageError(
            "give the JAX module: a map of names does not make one"
            if candidate is None
            else "names pairs the modules of an NNX module; any other candidate is compared "
            "without it"
        )
    if candidate is None or (not named and ("dialect" in options or _is_own(candidate))):
        options.pop("names", None)
        try:
            return _compare_own(torch_module, candidate, inputs, jax_inputs, dict(options))
        except UnknownDialectError:
            # Nobody knows which modules of the reference its modules mirror.
            if candidate is None or options.keys() - set(OPTIONS):
                raise
    others = [name for name in options if name not in OPTIONS]
    if others:
        raise UsageError(f"{', '.join(others)}: serves jaxformer's own models, without names")
    return compare_operators(torch_module, candidate, inputs, jax_inputs, **options)


def assert_parity(
    torch_module: Any, candidate: Any = None, inputs: Any = (), **options: Any
) -> Report:
    """Calls ``compare`` in a test, and returns the report if every difference is rounding.

    Raises:
        AssertionError: there is a bug; the message names every root cause. Or something was not
            compared; the message says what.
    """
    return check_parity(compare(torch_module, candidate, inputs, **options))


def check_parity(report: Report) -> Report:
    """Returns a report in which every difference is rounding, and all was compared.

    Raises:
        AssertionError: it has a bug, or something was not compared; the message says what.
    """
    if report.verdict in ("bug", "incomplete"):
        found = [f"{cause.path or 'the model'}: {cause.message}" for cause in report.root_causes]
        first = "; ".join([*found, *report.weights, *report.incomplete])
        raise AssertionError(f"{first}\n\n{report}")
    return report


def _is_own(candidate: Any) -> bool:
    """Returns whether a candidate is one of jaxformer's own modules, and not only made of them."""
    return isinstance(candidate, nnx.Module) and any(
        kind.__module__.startswith("jaxformer.") for kind in type(candidate).__mro__
    )


def _compare_own(
    torch_module: Any, candidate: Any, inputs: Any, jax_inputs: Any, options: dict[str, Any]
) -> Report:
    """Compares one of jaxformer's own modules, whose inputs are a list in order.

    Raises:
        UsageError: the reference's inputs have names which the candidate's have not, or it fails on
            them.
    """
    if isinstance(inputs, Mapping):
        if jax_inputs is None and len(inputs) > 1:
            raise UsageError(
                f"give jax_inputs: jaxformer's model takes its inputs by other names than "
                f"{', '.join(inputs)}"
            )
        options.setdefault("torch_call", _by_name(inputs))
    if isinstance(jax_inputs, Mapping):
        options.setdefault("jax_call", _by_name(jax_inputs))
    named = inputs if isinstance(inputs, Mapping) else {}

    def raised(_: Exception) -> Exception | None:
        args, kwargs = arguments(inputs)
        return raised_alone(
            torch_module, args or list(kwargs.values()), {}, options.get("torch_call")
        )

    with (
        experts_one_by_one(torch_module),
        naming_failures("reference", _as_list(inputs) or (), {}, raised),
        naming_misfits("reference", torch_module.forward if named else None, [], named),
    ):
        return modules.compare(
            torch_module,
            candidate,
            _as_list(inputs) or (),
            jax_inputs=_as_list(jax_inputs),
            **options,
        )


def _by_name(inputs: Mapping[str, Any]) -> Caller:
    """Returns what calls a model with inputs by their names, given them in order."""
    return lambda module, given: module(**dict(zip(inputs, given, strict=True)))


def _as_list(inputs: Any) -> Sequence[Any] | None:
    if inputs is None or isinstance(inputs, list | tuple):
        return inputs
    return list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
