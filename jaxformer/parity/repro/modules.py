"""Builds the modules of a repro, gives them weights, and encodes what they are called with."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.config_tree import from_dict
from jaxformer.errors import UsageError
from jaxformer.parameters import abstract_module, join_path, merge
from jaxformer.parity.matching.positions import give_tables, table_difference
from jaxformer.parity.recording.torch_values import (
    array,
    as_numpy,
    everything_in_float64,
    floats,
    in_float64,
    require_torch,
    tensor,
    without_fast_path,
)
from jaxformer.parity.sources.checkpoints import as_tensor, make_twin
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG
from jaxformer.positions import Rotary

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class ReferenceOutcome:
    """What a module of the reference gives by itself, in float64.

    Attributes:
        outputs: the float arrays of its result.
        cotangent: the random gradient of the first of them; None for no gradients.
        input_gradients: of its float arguments, by name.
        gradients: of its parameters, by name.
    """

    outputs: list[np.ndarray]
    cotangent: np.ndarray | None = None
    input_gradients: Arrays = dataclasses.field(default_factory=dict)
    gradients: Arrays = dataclasses.field(default_factory=dict)


def run_reference(
    module: Any, call: Mapping[str, Any], arrays: Arrays, *, backward: bool
) -> ReferenceOutcome:
    """Runs one module of the reference by itself, in float64.

    Args:
        module: the PyTorch module.
        call: its arguments, encoded.
        arrays: the arrays among the arguments, by name.
        backward: whether to compute gradients too, from a random gradient of the output.
    """
    torch = require_torch()
    wide = in_float64(module)
    tensors = {name: tensor(array) for name, array in arrays.items()}
    leaves = {name: one for name, one in tensors.items() if one.is_floating_point()}
    parameters = dict(wide.named_parameters(remove_duplicate=False))
    parameters = {name: one for name, one in parameters.items() if one.is_floating_point()}
    for one in (*leaves.values(), *parameters.values()):
        one.requires_grad_(backward)
    args = [decode(each, tensors) for each in call["args"]]
    kwargs = {name: decode(each, tensors) for name, each in call["kwargs"].items()}
    with everything_in_float64(), without_fast_path(), torch.set_grad_enabled(backward):
        made = floats(wide(*args, **kwargs))
        outputs = [array(one) for one in made]
        if not backward or not made or not made[0].requires_grad:
            return ReferenceOutcome(outputs)
        # Random, so that every element of the output has an effect.
        cotangent = np.random.default_rng(0).standard_normal(outputs[0].shape)
        found = torch.autograd.grad(
            made[0], [*leaves.values(), *parameters.values()], torch.from_numpy(cotangent),
            allow_unused=True,
        )  # fmt: skip
    gradients = [None if one is None else array(one) for one in found]
    inputs = dict(zip(leaves, gradients[: len(leaves)], strict=True))
    own = dict(zip(parameters, gradients[len(leaves) :], strict=True))
    return ReferenceOutcome(
        outputs,
        cotangent,
        {name: one for name, one in inputs.items() if one is not None},
        {name: one for name, one in own.items() if one is not None},
    )


def encode(value: Any, arrays: dict[str, np.ndarray], seen: dict[int, str]) -> Any:
    """Encodes an argument of a call as JSON, with its arrays apart.

    Args:
        value: the argument.
        arrays: by name; those of the value are added.
        seen: the names of arrays by identity, because one may occur twice.

    Raises:
        UsageError: the argument holds something that cannot be written.
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
    """Returns the argument that ``encode`` encoded."""
    if "items" in value:
        items = [decode(each, arrays) for each in value["items"]]
        return tuple(items) if value["tuple"] else items
    if "fields" in value:
        return {name: decode(each, arrays) for name, each in value["fields"].items()}
    return arrays[value["array"]] if "array" in value else value["value"]


def build_reference(library: str, kind: str, config: Mapping[str, Any]) -> Any:
    """Builds a whole reference model without its weights.

    Args:
        library: transformers or torch_ref.
        kind: the name of its class.
        config: its settings.

    Raises:
        UsageError: the library is not installed, or not one of these.
    """
    torch = require_torch()
    with torch.device("meta"):
        if library == "torch_ref":
            return make_twin(_parse_config(kind, config))
        if library == "transformers":
            try:
                import transformers
            except ImportError as error:
                raise UsageError(
                    "this repro needs transformers: pip install transformers"
                ) from error
            cls = getattr(transformers, kind)
            settings = cls.config_class.from_dict(dict(config), attn_implementation="eager")
            return cls(settings)
    raise UsageError("how the reference is built is not known: build it in repro.py")


def build_candidate(kind: str, config: Mapping[str, Any]) -> Any:
    """Builds a whole jaxformer model, with shapes in place of weights.

    Args:
        kind: the name of its class.
        config: its settings.

    Raises:
        UsageError: the class is not known.
    """
    made = _parse_config(kind, config)
    cls = MODEL_OF_CONFIG[type(made)]
    module = abstract_module(lambda rngs: cls(made, rngs=rngs))
    module.eval()
    return module


def _parse_config(kind: str, config: Mapping[str, Any]) -> Any:
    for cls, model in MODEL_OF_CONFIG.items():
        if model.__name__ == kind:
            return from_dict(cls, dict(config))
    raise UsageError("how the candidate is built is not known: build it in repro.py")


def load_state(module: Any, state: Mapping[str, StoredTensor]) -> Any:
    """Gives a PyTorch module all its parameters and buffers; returns it in evaluation mode.

    Raises:
        UsageError: the names are not those of the module.
    """
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    if own.keys() != state.keys():
        listed = ", ".join(sorted(own.keys() ^ state.keys()))
        raise UsageError(f"the reference's module has not the arrays of the repro: {listed}")
    torch = require_torch()
    for name, stored in state.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        value = as_tensor(stored.read())
        if leaf in owner._parameters:
            owner._parameters[leaf] = torch.nn.Parameter(
                value, requires_grad=value.is_floating_point()
            )
        else:
            owner._buffers[leaf] = value
    return module.eval()


def with_weights(module: Any, arrays: Arrays) -> Any:
    """Returns a JAX module with other weights, in float64 and in evaluation mode.

    Raises:
        UsageError: the names are not those of the module.
    """
    definition, state = nnx.split(module, nnx.Param)
    own = {join_path(path) for path, _ in nnx.to_flat_state(state)}
    if own != arrays.keys():
        listed = ", ".join(sorted(own ^ arrays.keys()))
        raise UsageError(f"the candidate's module has not the arrays of the repro: {listed}")
    made = merge(definition, {name: jnp.asarray(a, jnp.float64) for name, a in arrays.items()})
    made.eval()
    return made


def share_saved_tables(module: Any, tables: Mapping[str, StoredTensor]) -> None:
    """Gives rotary positions the reference's tables, if the two differ by rounding only."""
    for _, node in nnx.iter_modules(module):
        if isinstance(node, Rotary) and tables:
            reference = tables["cos"].read(), tables["sin"].read()
            difference = table_difference(node.tables(), reference)
            if difference is not None and not difference.is_bug:
                give_tables(node, reference)


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "untyped_storage"):
        return np.asarray(as_numpy(value))
    return np.asarray(value)
