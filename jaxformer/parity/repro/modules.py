"""Modules of a repro: what they are called with, how they are built anew and given weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.config import from_dict
from jaxformer.errors import UsageError
from jaxformer.parameters import join_path, merge
from jaxformer.parity.compare.reference_run import ReferenceRun
from jaxformer.parity.matching.positions import give_tables, table_difference
from jaxformer.parity.sources.checkpoints import as_tensor, make_twin
from jaxformer.parity.trace import torch_trace as torch_trace
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG
from jaxformer.positions import Rotary

Arrays = Mapping[str, np.ndarray]


def noted_arguments(
    reference: ReferenceRun, paths: Sequence[str]
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """What modules of theirs are first called with, in float64."""
    torch = torch_trace.require_torch()
    module = torch_trace.in_float64(reference.module)
    noted: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    handles = []
    for path in paths:

        def note(inner: Any, args: Any, kwargs: Any, path: str = path) -> None:
            noted.setdefault(path, (args, kwargs))

        handles.append(module.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True))
    inputs = [
        torch.as_tensor(x) if isinstance(x, np.ndarray) else x
        for x in torch_trace.in_dtype(reference.inputs, "float64")
    ]
    try:
        with torch_trace.everything_in_float64(), torch.no_grad():
            reference.call(module, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return noted


def state_of(module: Any) -> dict[str, np.ndarray]:
    """All parameters and buffers of a module of theirs, those that are not saved too."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: np.asarray(torch_trace.as_numpy(value.detach())) for name, value in named}


def run_reference(
    module: Any, call: Mapping[str, Any], arrays: Arrays, *, backward: bool
) -> torch_trace.Trace:
    """Runs one of their modules by itself, in float64.

    Args:
        module: theirs.
        call: its arguments, encoded.
        arrays: of them.
        backward: whether to pull a gradient back through it.
    """
    names = list(arrays)

    def run(module: Any, given: Sequence[Any]) -> Any:
        tensors = dict(zip(names, given, strict=True))
        args = [decode(each, tensors) for each in call["args"]]
        return module(
            *args, **{name: decode(each, tensors) for name, each in call["kwargs"].items()}
        )

    def cotangents(outputs: list[np.ndarray]) -> list[np.ndarray]:
        # A gradient in every direction, so that nothing can hide.
        return [np.random.default_rng(0).standard_normal(outputs[0].shape)]

    with torch_trace.everything_in_float64():
        return torch_trace.run(
            torch_trace.in_float64(module), [arrays[name] for name in names], call=run,
            cotangents=cotangents if backward else None, keep=lambda path: path == "",
            weights=False,
        )  # fmt: skip


def encode(value: Any, arrays: dict[str, np.ndarray], seen: dict[int, str]) -> Any:
    """An argument of a call as JSON, its arrays put aside.

    Args:
        value: the argument.
        arrays: by name; those of the value are added.
        seen: the names of arrays by identity, as one may be given twice.

    Raises:
        UsageError: it holds something that cannot be written.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, tuple | list):
        return {
            "items": [encode(each, arrays, seen) for each in value],
            "tuple": isinstance(value, tuple),
        }
    if isinstance(value, dict):
        return {"fields": {str(name): encode(each, arrays, seen) for name, each in value.items()}}
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if id(value) not in seen:
            seen[id(value)] = str(len(arrays))
            arrays[seen[id(value)]] = _array(value)
        return {"array": seen[id(value)]}
    raise UsageError(f"a {type(value).__name__} among its arguments cannot be written to a file")


def decode(value: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    """The inverse of ``encode``."""
    if "items" in value:
        items = [decode(each, arrays) for each in value["items"]]
        return tuple(items) if value["tuple"] else items
    if "fields" in value:
        return {name: decode(each, arrays) for name, each in value["fields"].items()}
    return arrays[value["array"]] if "array" in value else value["value"]


def build_torch(library: str, kind: str, config: Mapping[str, Any]) -> Any:
    """A whole model of theirs without its weights.

    Raises:
        UsageError: it is not known how, or what it needs is not installed.
    """
    torch = torch_trace.require_torch()
    with torch.device("meta"):
        if library == "torch_ref":
            return make_twin(_candidate_config(kind, config))
        if library == "transformers":
            try:
                import transformers
            except ImportError as error:
                raise UsageError(
                    "this repro needs transformers: pip install transformers"
                ) from error
            cls = getattr(transformers, kind)
            # Through JSON, as from a file.
            settings = cls.config_class.from_dict(dict(config), attn_implementation="eager")
            return cls(settings)
    raise UsageError("how theirs is built is not known: build it in repro.py")


def build_candidate(kind: str, config: Mapping[str, Any]) -> Any:
    """A whole model of ours, with shapes in place of weights.

    Raises:
        UsageError: it is not known how.
    """
    made = _candidate_config(kind, config)
    cls = MODEL_OF_CONFIG[type(made)]
    module = nnx.eval_shape(lambda: cls(made, rngs=nnx.Rngs(0)))
    module.eval()
    return module


def _candidate_config(kind: str, config: Mapping[str, Any]) -> Any:
    for cls, model in MODEL_OF_CONFIG.items():
        if model.__name__ == kind:
            return from_dict(cls, dict(config))
    raise UsageError("how ours is built is not known: build it in repro.py")


def load_state(module: Any, state: Mapping[str, StoredTensor]) -> Any:
    """Gives a module of theirs its parameters and buffers.

    Raises:
        UsageError: it has others.
    """
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    if own.keys() != state.keys():
        listed = ", ".join(sorted(own.keys() ^ state.keys()))
        raise UsageError(f"their module has not the arrays of the repro: {listed}")
    torch = torch_trace.require_torch()
    for name, tensor in state.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        value = as_tensor(tensor.read())
        if leaf in owner._parameters:
            owner._parameters[leaf] = torch.nn.Parameter(
                value, requires_grad=value.is_floating_point()
            )
        else:
            owner._buffers[leaf] = value
    return module.eval()


def with_weights(module: Any, arrays: Arrays) -> Any:
    """A module of ours with other weights, in float64.

    Raises:
        UsageError: it has others.
    """
    definition, state = nnx.split(module, nnx.Param)
    own = {join_path(path) for path, _ in nnx.to_flat_state(state)}
    if own != arrays.keys():
        listed = ", ".join(sorted(own ^ arrays.keys()))
        raise UsageError(f"our module has not the arrays of the repro: {listed}")
    made = merge(definition, {name: jnp.asarray(a, jnp.float64) for name, a in arrays.items()})
    made.eval()
    return made


def share_saved_tables(module: Any, tables: Mapping[str, StoredTensor]) -> None:
    """Gives rotary positions the tables of theirs, if ours are the same but for rounding."""
    for _, node in nnx.iter_modules(module):
        if isinstance(node, Rotary) and tables:
            reference = tables["cos"].read(), tables["sin"].read()
            difference = table_difference(node.tables(), reference)
            if difference is not None and not difference.is_bug:
                give_tables(node, reference)


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "untyped_storage"):
        return np.asarray(torch_trace.as_numpy(value))
    return np.asarray(value)
