"""``from_torch`` and ``to_torch``: a module of theirs as one of ours, and back."""

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxformer.errors import UsageError
from jaxformer.parameters import Parameters, get_parameters, merge
from jaxformer.porting.dialects import detect_dialect, find_dialect
from jaxformer.porting.formats.arrays import tensors_of
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG
from jaxformer.porting.mapping.matching import WRAPPERS
from jaxformer.porting.mapping.plans import Origin, Plan, plan_export, plan_import

# A module's state is its parameters alone, so where it came from is remembered beside it.
_ORIGINS: "weakref.WeakKeyDictionary[nnx.Module, Origin]" = weakref.WeakKeyDictionary()


def from_torch(
    source: Any,
    dialect: str | None = None,
    config: Any = None,
    *,
    ignore: Sequence[str] = (),
) -> Any:
    """A module of ours with the weights and the settings of a PyTorch one.

    It computes the same, is called with the same positional arguments, masks in our convention
    (boolean, True = may attend), and is in evaluation mode if the PyTorch module was. Arrays alone
    give a module in evaluation mode.

    Args:
        source: a ``torch.nn.Module``, or arrays by name (a state dict; torch or numpy).
        dialect: whose classes and names these are; by default the class or the names tell.
        config: settings, which go before those of the module: a config of theirs (a mapping or an
            object with ``to_dict``), a config of ours, a module of ours whose weights are to be
            replaced, or a mapping of constructor arguments (``{"class": …, "num_heads": …}``).
        ignore: patterns of names to leave out, such as ``bert.pooler.*``.

    Returns:
        An NNX module in the dtype of the weights.

    Raises:
        UsageError: the dialect or class is unknown, or a setting is missing or not ours to make.
        CheckpointError: arrays are missing, unexpected, of another shape, or tied ones differ; all
            are listed.
    """
    plan = import_plan(source, dialect, config, ignore=ignore)
    return build(plan, training=bool(getattr(source, "training", False)))


def import_plan(
    source: Any,
    dialect: str | None = None,
    config: Any = None,
    *,
    ignore: Sequence[str] = (),
) -> Plan:
    """How a PyTorch module, or arrays, would be imported; see ``from_torch``."""
    module = _unwrapped(source) if hasattr(source, "state_dict") else None
    tensors = tensors_of(source if module is None else module.state_dict())
    kinds = [] if module is None else [c.__name__ for c in type(module).__mro__]
    settings = _as_mapping(config)
    if settings is None and module is not None:
        settings = _as_mapping(getattr(module, "config", None))
    found = (
        detect_dialect(tensors, config=settings, module=module)
        if dialect is None
        else find_dialect(dialect)
    )
    return plan_import(tensors, found, kinds=kinds, module=module, config=settings, ignore=ignore)


def build(plan: Plan, *, training: bool = False) -> Any:
    """The module that an import gives, its weights read now.

    Raises:
        UsageError: the weights are float64 and JAX is not set to hold such.
    """
    definition, rest = nnx.split(plan.module)
    del rest
    arrays = {name: _on_device(name, tensor) for name, tensor in plan.tensors.items()}
    result = merge(definition, arrays)
    for name, array in plan.origin.buffers.items():
        for buffer in plan.module_mapping.buffers:
            if buffer.install is not None and buffer.matches(name):
                buffer.install(result, array)
    result.train() if training else result.eval()
    _ORIGINS[result] = plan.origin
    return result


def to_torch(module: Any, dialect: str | None = None) -> dict[str, np.ndarray]:
    """The state dict of the PyTorch module that computes what a module of ours does.

    Args:
        module: any of ours.
        dialect: whose names to use; by default those it came with, else torch_ref's.

    Returns:
        C-contiguous arrays by name, in the dtype of the weights; a tied array under both of its
        names, and what the class keeps beside its parameters (masks, tables).

    Raises:
        UsageError: the dialect is unknown, or has no class that computes the same; all that stands
            against it is listed.
    """
    return {name: tensor.read() for name, tensor in export_plan(module, dialect).tensors.items()}


def export_plan(
    module: Any, dialect: str | None = None, parameters: Parameters | None = None
) -> Plan:
    """How a module of ours is exported, with its own parameters or others; see ``to_torch``."""
    origin = _ORIGINS.get(module)
    if dialect is None:
        found = find_dialect("torch_ref") if origin is None else origin.dialect
    else:
        found = find_dialect(dialect)
    parameters = get_parameters(module) if parameters is None else parameters
    tensors = {name: StoredTensor.of(np.asarray(a)) for name, a in parameters.items()}
    return plan_export(module, tensors, found, origin=origin)


def _unwrapped(module: Any) -> Any:
    """The PyTorch module that torch.compile or data parallelism has wrapped."""
    while len(children := dict(module.named_children())) == 1:
        ((name, child),) = children.items()
        if f"{name}." not in WRAPPERS:
            break
        module = child
    return module


def _as_mapping(config: Any) -> Any:
    """A foreign config object as a mapping; anything else as it is."""
    if config is None or isinstance(config, Mapping | nnx.Module):
        return config
    if dataclasses.is_dataclass(config) and type(config) not in MODEL_OF_CONFIG:
        return dict(vars(config))
    return config.to_dict() if hasattr(config, "to_dict") else config


def _on_device(name: str, tensor: StoredTensor) -> jax.Array:
    if tensor.dtype == np.float64 and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise UsageError(
            f"{name} is float64: call jax.config.update('jax_enable_x64', True) first, or cast "
            "the weights to float32"
        )
    return jax.numpy.asarray(tensor.read())
