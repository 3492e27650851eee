"""Tensors as numpy arrays, and PyTorch models and inputs in other precisions.

torch comes with the extra ``torch`` and is imported only inside functions, by ``require_torch``.
"""

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxformer.hardware.invocation import install
from jaxformer.porting.formats.arrays import to_stored_tensors


def require_torch() -> Any:
    """Imports and returns the torch package.

    Raises:
        UsageError: it is not installed; the message names the extra.
    """
    try:
        import torch
    except ImportError as error:
        from jaxformer.errors import UsageError

        raise UsageError(f"comparing with PyTorch needs torch: {install('torch')}") from error
    return torch


def in_float64(module: Any) -> Any:
    """Returns a copy of a module with the same numbers in float64, in evaluation mode."""
    return finish_float64(copy.deepcopy(module).double().eval())


def widest(dtype: Any) -> Any:
    """Returns the dtype of PyTorch to compute with in place of another: float64 for floats."""
    torch = require_torch()
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def finish_float64(module: Any) -> Any:
    """Returns a module in float64, after what is kept in another dtype beside its arrays."""
    for inner in module.modules():
        # Gemma keeps the square root of its width as a float32 buffer beside the number.
        if hasattr(inner, "scalar_embed_scale"):
            inner.embed_scale = require_torch().tensor(
                inner.scalar_embed_scale, dtype=require_torch().float64
            )
    return module


def in_narrow(module: Any, dtype: str) -> Any:
    """Returns a copy of a module in the dtype that it is used in, in evaluation mode."""
    torch = require_torch()
    wanted = getattr(torch, dtype)
    # Nobody writes to parameters: those that have the dtype need no copy.
    same = {id(p): p for p in module.parameters() if p.dtype == wanted}
    narrow = copy.deepcopy(module, same)
    # transformers keeps rotary frequencies in float32: in bfloat16 all angles would be wrong.
    kept = {name: b for name, b in narrow.named_buffers() if name.endswith("inv_freq")}
    narrow = narrow.to(wanted).eval()
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        narrow.get_submodule(owner)._buffers[leaf] = buffer
    return narrow


@contextlib.contextmanager
def everything_in_float64() -> Iterator[None]:
    """Makes ``torch.float32`` mean float64, for the whole process, inside the ``with`` block.

    Models cast to float32 inside (norms, softmax, rotary tables), which would lower the precision
    of a float64 run, and integers become floats of the default dtype. Only the exact run uses this.
    """
    torch = require_torch()
    saved = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float, default = saved
        torch.set_default_dtype(default)


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Makes torch.nn's encoder call its submodules, which it skips where no gradient is needed."""
    mha = require_torch().backends.mha
    saved = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(saved)


@contextlib.contextmanager
def experts_one_by_one(module: Any) -> Iterator[None]:
    """Makes models of transformers call one expert after the other inside the ``with`` block.

    The products of all experts at once, which transformers 5 uses by default, take no float64. A
    copy that is made inside the block calls one expert after the other for good.

    Args:
        module: it may hold such models; afterwards it is as before.
    """
    found = (getattr(part, "config", None) for part in module.modules())
    configs: dict[int, Any] = {
        id(config): config for config in found if hasattr(config, "_experts_implementation")
    }
    saved = [(config, config._experts_implementation) for config in configs.values()]
    # Given a dict, a config leaves the configs inside of it as they are.
    for config, _ in saved:
        config._experts_implementation = {"": "eager"}
    try:
        yield
    finally:
        for config, name in saved:
            config._experts_implementation = {"": name}


def as_numpy(value: Any) -> Any:
    """Returns a tensor or an array of JAX as one of numpy, anything else unchanged."""
    if isinstance(value, jax.Array):
        return np.asarray(value)
    return array(value) if _is_tensor(value) else value


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns what a function makes of a value, or of each in nested lists, tuples and dicts."""
    if type(value) is dict:
        return {name: map_nested(function, inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_nested(function, inner) for inner in value)
    return function(value)


def fresh(value: Any) -> Any:
    """Returns a nested argument with tensors of their own, of which one stays one."""
    known: dict[int, Any] = {}

    def one(tensor: Any) -> Any:
        if not hasattr(tensor, "untyped_storage"):
            return tensor
        return known.setdefault(id(tensor), tensor.detach().clone())

    return map_nested(one, value)


def in_dtype(inputs: Sequence[Any], dtype: str) -> list[Any]:
    """Returns inputs with their float arrays in another dtype; no array is one of the inputs.

    JAX 0.10 may take an array of 64 bits, in its mode of 64 bits, for the one of 32 that it made of
    the same object in the other mode.
    """
    wanted = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def cast(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        return x.astype(wanted if _is_float_dtype(x.dtype) else x.dtype)

    return [cast(x) for x in inputs]


def first_float(output: Any) -> Any:
    """Returns a model's logits: the first float tensor of its result."""
    return output.logits if hasattr(output, "logits") else floats(output)[0]


def _is_float_dtype(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def _is_tensor(value: Any) -> bool:
    # What is no tensor may still have every attribute, as nnx.Rngs has.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_float(value: Any) -> bool:
    """Returns whether a value is a tensor of floats."""
    return _is_tensor(value) and value.dtype.is_floating_point


def is_integer(value: Any) -> bool:
    """Returns whether a value is a tensor of integers."""
    return (
        _is_tensor(value)
        and not value.dtype.is_floating_point
        and str(value.dtype).startswith("torch.int")
    )


def integers(value: Any) -> list[Any]:
    """Returns the integer tensors of a named tuple, in order; none of any other result."""
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    return [tensor for tensor in value if is_integer(tensor)] if is_named else []


def floats(value: Any) -> list[Any]:
    """Returns the float tensors of a nested result, in order."""
    return [tensor for _, tensor in named_tensors(value) if is_float(tensor)]


def is_whole(value: Any) -> bool:
    """Returns whether a value is a tensor of integers or truth values."""
    kinds = ("torch.bool", "torch.uint8")
    return is_integer(value) or (_is_tensor(value) and str(value.dtype) in kinds)


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the tensors of a nested result with their paths, in order."""
    if _is_tensor(value):
        yield path, value
        return
    inside: Iterable[tuple[Any, Any]] = ()
    if type(value) is dict:
        # In the order of names, as in a JAX tree.
        inside = [(name, value[name]) for name in sorted(value)]
    elif isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list | tuple):
        inside = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif dataclasses.is_dataclass(value):
        inside = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    for name, inner in inside:
        yield from named_tensors(inner, f"{path}.{name}".lstrip("."))


def result_tensors(result: Any) -> list[tuple[str, Any]]:
    """Returns the tensors that a model returned with their paths.

    An object of a class of the user's own is opened where it is the whole result. Inside of one it
    may be a cache, which is no result.
    """
    found = list(named_tensors(result))
    return found or list(named_tensors(dict(getattr(result, "__dict__", {}))))


def tensor(array: np.ndarray) -> Any:
    """Returns a copy of an array as a tensor."""
    torch = require_torch()
    # The array may be a view that must not be written to.
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def view(tensor: Any) -> np.ndarray:
    """Returns a tensor as an array that shares its memory if it is in host memory."""
    # It may be marked as the conjugate of what is in memory.
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.view(require_torch().int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def array(tensor: Any) -> np.ndarray:
    """Returns a copy of a tensor as an array."""
    return to_stored_tensors({"": tensor})[""].read()
