"""Their numbers: tensors as arrays, models and inputs in other precisions.

This package is where torch may be imported; it comes with the extra ``torch``.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxformer.porting.formats.arrays import tensors_of


def require_torch() -> Any:
    """The torch package.

    Raises:
        UsageError: it is not installed; the message names the extra.
    """
    try:
        import torch
    except ImportError as error:
        from jaxformer.errors import UsageError

        raise UsageError(
            'comparing with PyTorch needs torch: pip install "jaxformer[torch]"'
        ) from error
    return torch


def in_float64(module: Any) -> Any:
    """A copy of a module with the same numbers in float64, in evaluation mode."""
    torch = require_torch()
    wide = copy.deepcopy(module).double().eval()
    for inner in wide.modules():
        # Gemma keeps the square root of its width as a float32 buffer beside the number.
        if hasattr(inner, "scalar_embed_scale"):
            inner.embed_scale = torch.tensor(inner.scalar_embed_scale, dtype=torch.float64)
    return wide


def in_narrow(module: Any, dtype: str) -> Any:
    """A copy of a module in the dtype that it is used in, in evaluation mode."""
    torch = require_torch()
    narrow = copy.deepcopy(module)
    # transformers keeps rotary frequencies in float32: in bfloat16 all angles would be wrong.
    kept = {name: b for name, b in narrow.named_buffers() if name.endswith("inv_freq")}
    narrow = narrow.to(getattr(torch, dtype)).eval()
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        narrow.get_submodule(owner)._buffers[leaf] = buffer
    return narrow


@contextlib.contextmanager
def everything_in_float64() -> Iterator[None]:
    """Makes float32 mean float64 to whoever asks torch for it.

    Models raise themselves to float32 inside (norms, softmax, rotary tables), which in float64
    lowers them, and integers become floats of the default dtype. This is for the exact run alone;
    it holds for the whole process while it lasts.
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


def as_numpy(value: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    return array(value) if hasattr(value, "untyped_storage") else value


def in_dtype(inputs: Sequence[Any], dtype: str) -> list[Any]:
    """Inputs with their floats in another dtype."""
    wanted = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return [
        x.astype(wanted) if isinstance(x, np.ndarray) and _is_float_dtype(x.dtype) else x
        for x in inputs
    ]


def first_float(output: Any) -> Any:
    """The first float tensor of a result: a model's logits, however it wraps them."""
    return output.logits if hasattr(output, "logits") else floats(output)[0]


def _is_float_dtype(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def is_float(value: Any) -> bool:
    """Whether it is a tensor of floats."""
    return hasattr(value, "untyped_storage") and value.dtype.is_floating_point


def is_integer(value: Any) -> bool:
    """Whether it is a tensor of integers."""
    return (
        hasattr(value, "untyped_storage")
        and not value.dtype.is_floating_point
        and str(value.dtype).startswith("torch.int")
    )


def floats(value: Any) -> list[Any]:
    """The float tensors of a result, in order, however it is nested."""
    if is_float(value):
        return [value]
    if type(value) is dict:
        # JAX takes them in the order of their names.
        value = [value[name] for name in sorted(value)]
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for inner in value for tensor in floats(inner)]
    return []


def tensor(array: np.ndarray) -> Any:
    """An array as a tensor."""
    torch = require_torch()
    # A copy: it may be a view that must not be written to.
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def view(tensor: Any) -> np.ndarray:
    """The numbers of a tensor, shared with it where it is in the processor's memory."""
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.view(require_torch().int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def array(tensor: Any) -> np.ndarray:
    """A copy of the numbers of a tensor."""
    return tensors_of({"": tensor})[""].read()
