"""``from_torch`` and ``to_torch``: a PyTorch module as an NNX module, and back, in memory."""

import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxformer.config_tree import flatten
from jaxformer.errors import UsageError
from jaxformer.hardware.array_memory import ArrayMemory, is_worth_pages
from jaxformer.parameters import Parameters, get_parameters, merge
from jaxformer.porting.arguments import read_names, wrong_kind
from jaxformer.porting.dialects import choose_dialect, find_dialect
from jaxformer.porting.dialects.multimodal import text_part
from jaxformer.porting.formats.arrays import to_stored_tensors
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG
from jaxformer.porting.mapping.casts import check_computes
from jaxformer.porting.mapping.plans import Origin, Plan, plan_export, plan_import
from jaxformer.porting.mapping.rules import copy_into
from jaxformer.porting.mapping.transfer import read_view
from jaxformer.porting.mapping.wrapped_names import WRAPPERS

# An NNX module has no place for where it came from, so that is remembered here.
_ORIGINS: "weakref.WeakKeyDictionary[nnx.Module, Origin]" = weakref.WeakKeyDictionary()


def from_torch(
    source: Any,
    dialect: str | None = None,
    config: Any = None,
    *,
    ignore: Sequence[str] = (),
    force: bool = False,
) -> Any:
    """Returns an NNX module with the weights and the settings of a PyTorch module.

    It computes the same and is called with the same positional arguments; masks are boolean, True =
    may attend. It is in training mode if the PyTorch module is. Arrays without a module give a
    module in evaluation mode.

    Args:
        source: a ``torch.nn.Module``, or arrays by name (a state dict; torch or numpy).
        dialect: whose classes and names these are; by default it is detected from the class or the
            names.
        config: settings, which take precedence over those of the module: a config of the source (a
            mapping or an object with ``to_dict``), a config of jaxformer, an NNX module whose
            weights are to be replaced, or a mapping of constructor arguments
            (``{"class": …, "num_heads": …}``).
        ignore: patterns of names to leave out, such as ``bert.pooler.*``; also names of settings
            that are known to be without effect.
        force: whether to take the dialect even where the config has another ``model_type``.

    Returns:
        An NNX module in the dtype of the weights.

    Raises:
        UsageError: the dialect or class is unknown, or a setting is missing or unsupported.
        CheckpointError: arrays are missing, unexpected, of another shape, or tied arrays differ;
            all problems are listed.
    """
    plan = import_plan(source, dialect, config, ignore=ignore, force=force)
    return build(plan, training=bool(getattr(source, "training", False)))


def import_plan(
    source: Any,
    dialect: str | None = None,
    config: Any = None,
    *,
    ignore: Sequence[str] = (),
    force: bool = False,
) -> Plan:
    """Returns the plan by which ``from_torch`` imports a PyTorch module, or arrays."""
    is_module = hasattr(source, "state_dict") and not isinstance(source, type)
    module = _unwrapped(source) if is_module else None
    if module is None and not isinstance(source, Mapping):
        raise UsageError(
            f"give a torch.nn.Module, or arrays by name (a state dict): got {type(source).__name__}"
            + (": jaxformer.load reads files" if isinstance(source, str | os.PathLike) else "")
        )
    arrays = source if module is None else module.state_dict()
    _check_arrays(arrays)
    tensors = to_stored_tensors(arrays)
    kinds = [] if module is None else [c.__name__ for c in type(module).__mro__]
    settings = as_settings(config)
    ignore = read_names("ignore", ignore)
    if settings is None and module is not None:
        settings = _as_mapping(getattr(module, "config", None))
    tensors, text = text_part(tensors, settings, ignore)
    if text is not settings:
        # The class is that of the whole, which none here is.
        kinds, module, settings = [], None, text
    found = choose_dialect(tensors, dialect, config=settings, module=module, force=force)
    if force and found.for_class(kinds) is None:
        # The arrays then show which of the dialect's classes it is.
        kinds = []
    return plan_import(tensors, found, kinds=kinds, module=module, config=settings, ignore=ignore)


def build(plan: Plan, *, training: bool = False) -> Any:
    """Reads the weights of an import, and returns the module with them.

    Raises:
        UsageError: the weights are float64 and JAX is not set to hold float64, or they are float8.
    """
    check_computes(plan.tensors)
    definition, rest = nnx.split(plan.module)
    del rest
    memory = ArrayMemory()
    arrays = {name: _on_device(name, tensor, memory) for name, tensor in plan.tensors.items()}
    result = merge(definition, arrays)
    for name, array in plan.origin.buffers.items():
        for buffer in plan.module_mapping.buffers:
            if buffer.install is not None and buffer.matches(name):
                buffer.install(result, array)
    result.train() if training else result.eval()
    _ORIGINS[result] = plan.origin
    return result


def to_torch(module: Any, dialect: str | None = None) -> dict[str, np.ndarray]:
    """Returns the state dict of the PyTorch module that computes the same as an NNX module.

    Args:
        module: any NNX module of jaxformer.
        dialect: whose names to use; by default those that it came with, else torch_ref's.

    Returns:
        C-contiguous arrays by name, in the dtype of the weights; a tied array under both of its
        names, and the buffers of the PyTorch class (masks, tables).

    Raises:
        UsageError: the dialect is unknown, or has no class that computes the same; all reasons are
            listed.
    """
    return {name: tensor.read() for name, tensor in export_plan(module, dialect).tensors.items()}


def export_plan(
    module: Any, dialect: str | None = None, parameters: Parameters | None = None
) -> Plan:
    """Returns the plan by which ``to_torch`` exports a module, with these or its own parameters."""
    if not isinstance(module, nnx.Module):
        raise UsageError(f"give an NNX module of jaxformer: got {type(module).__name__}")
    origin = _ORIGINS.get(module)
    if dialect is None:
        found = find_dialect("torch_ref") if origin is None else origin.dialect
    else:
        found = find_dialect(dialect)
    parameters = get_parameters(module) if parameters is None else parameters
    tensors = {name: StoredTensor.of(np.asarray(a)) for name, a in parameters.items()}
    return plan_export(module, tensors, found, origin=origin)


def _unwrapped(module: Any) -> Any:
    """Returns the PyTorch module inside of torch.compile, data parallelism and other wrappers."""
    while len(children := dict(module.named_children())) == 1:
        ((name, child),) = children.items()
        if name not in WRAPPERS:
            break
        module = child
    return module


def _check_arrays(arrays: Mapping[Any, Any]) -> None:
    """Checks that arrays have names, and tensors of PyTorch their numbers in memory.

    Raises:
        UsageError: one has not.
    """
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise UsageError(f"arrays are given by name: {name!r} is no name")
        if getattr(array, "is_meta", False):
            raise UsageError(f"{name} is on PyTorch's meta device, without numbers: load it first")
        if hasattr(array, "untyped_storage") and str(array.layout) != "torch.strided":
            raise UsageError(f"{name} is a sparse tensor: call its to_dense() first")


def as_settings(config: Any) -> Any:
    """Returns the argument ``config`` of a function as ``plan_import`` takes it.

    Raises:
        UsageError: it holds no settings.
    """
    settings = _as_mapping(config)
    is_known = (
        isinstance(settings, Mapping | nnx.Module | None) or type(settings) in MODEL_OF_CONFIG
    )
    if not is_known:
        raise wrong_kind("config", "settings by name, a config of a model or an NNX module", config)
    return settings


def _as_mapping(config: Any) -> Any:
    """Returns a config object of the source as a mapping, and anything else as it is."""
    if config is None or isinstance(config, Mapping | nnx.Module):
        return config
    if type(config) in MODEL_OF_CONFIG:
        return config
    if hasattr(config, "to_dict"):
        return config.to_dict()
    return flatten(config) if dataclasses.is_dataclass(config) else config


def _on_device(name: str, tensor: StoredTensor, memory: ArrayMemory) -> jax.Array:
    if tensor.dtype == np.float64 and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise UsageError(
            f"{name} is float64: call jax.config.update('jax_enable_x64', True) first, or cast "
            "the weights to float32"
        )
    # Not ``jnp.array``, which compiles a program for each shape of a numpy array.
    if not is_worth_pages(tensor.nbytes):
        return jax.device_put(tensor.read(), may_alias=False)
    array = memory.empty(tensor.shape, tensor.dtype)
    copy_into(array, read_view(tensor))
    return jax.device_put(array, may_alias=True)
