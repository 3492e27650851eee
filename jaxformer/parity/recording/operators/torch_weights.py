"""The weights of a module in float64, each in memory only while an operator reads it.

All weights of a large model in float64 would be the largest thing in memory, beside the weights as
the module has them.
"""

import copy
import math
import mmap
from typing import Any

import numpy as np

from jaxformer.parity.cores import copy_to, widened
from jaxformer.parity.recording.operators.graph import LARGE
from jaxformer.parity.recording.operators.references import computed_attributes
from jaxformer.parity.recording.torch_values import (
    finish_float64,
    require_torch,
    view,
    widest,
)

# Memory of which a part can be given back is not found on every system.
IS_KNOWN = hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MADV_DONTNEED")


class Weight:
    """A large parameter in float64, with memory that is given back and filled again.

    Between ``fill`` and ``empty`` the memory holds the numbers; else its numbers are zeros, which
    take no memory.

    Args:
        narrow: the parameter as the module has it.

    Attributes:
        parameter: what takes its place.
    """

    def __init__(self, narrow: Any):
        torch = require_torch()
        self._narrow = view(narrow)
        self._memory = mmap.mmap(
            -1, 8 * self._narrow.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._array = np.frombuffer(self._memory, np.float64).reshape(self._narrow.shape)
        self.parameter = torch.nn.Parameter(torch.from_numpy(self._array))
        vars(self.parameter).update(vars(narrow))

    @property
    def place(self) -> int:
        """Where its memory begins."""
        return int(self.parameter.data_ptr())

    def read(self) -> np.ndarray:
        """Returns its numbers as an array of their own."""
        return widened(self._narrow)

    def fill(self) -> None:
        """Puts the numbers into the memory."""
        copy_to(self._array, self._narrow)

    def empty(self) -> None:
        """Gives the memory back, until it is filled again."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def keep_what_is_read(weights: dict[int, Weight]) -> Any:
    """Returns a mode in which a weight that is read by no operator, as by ``numpy``, stays full.

    Args:
        weights: those that are emptied after each operator; such a weight is taken out of them.
    """
    torch = require_torch()
    reads = {"numpy", "__array__", "tolist", "__dlpack__", "data_ptr", "untyped_storage", "storage"}

    class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
        """Looks at calls of functions before they become operators."""

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if args and getattr(func, "__name__", "") in reads:
                with torch._C.DisableTorchFunction():
                    place = args[0].untyped_storage().data_ptr()
                if place in weights:
                    weights.pop(place).fill()
            return func(*args, **(kwargs or {}))

    return Mode()


def with_wide_weights(module: Any) -> tuple[Any, dict[int, Weight]]:
    """Returns a copy of a module in float64, in evaluation mode, and its weights, which are empty.

    Args:
        module: it is not changed.

    Returns:
        the copy; and those of its parameters that are large, by where their memory begins.
    """
    weights = {id(p): Weight(p) for p in module.parameters() if _is_large(p)}
    replaced = {key: weight.parameter for key, weight in weights.items()}
    # Each call computes these again, see ``check_reference``.
    computed = [t for inner in module.modules() for t in computed_attributes(inner).values()]
    replaced |= {id(tensor): tensor.detach() for tensor in computed}
    wide = copy.deepcopy(module, dict(replaced)).eval()
    wide._apply(lambda tensor: tensor.to(widest(tensor.dtype)))
    return finish_float64(wide), {weight.place: weight for weight in weights.values()}


def _is_large(parameter: Any) -> bool:
    is_usual = type(parameter) is require_torch().nn.Parameter and parameter.is_contiguous()
    is_on_host = parameter.device.type == "cpu" and parameter.layout == require_torch().strided
    is_large = 8 * math.prod(parameter.shape) >= LARGE and parameter.dtype.is_floating_point
    return IS_KNOWN and is_usual and is_on_host and is_large


def remarks_on_training(module: Any) -> list[str]:
    """Returns what to say of a reference in training mode, if that computes something else."""
    nn = require_torch().nn.modules
    kinds = {
        type(inner).__name__
        for inner in module.modules()
        if inner.training
        and (
            isinstance(inner, nn.batchnorm._BatchNorm)
            or (isinstance(inner, nn.dropout._DropoutNd) and inner.p > 0)
        )
    }
    if not kinds:
        return []
    return [
        f"the reference is in training mode, and was compared in evaluation mode: "
        f"{', '.join(sorted(kinds))}"
    ]
