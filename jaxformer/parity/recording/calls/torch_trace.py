"""One pass of a PyTorch model, with the inputs, outputs and gradients of every submodule."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.recording.calls.padding import Padding, find_padding
from jaxformer.parity.recording.calls.torch_recorder import CallRecorder, TorchCall
from jaxformer.parity.recording.reference_modules import modules_of, owner_of
from jaxformer.parity.recording.torch_values import (
    as_numpy,
    everything_in_float64,
    experts_one_by_one,
    first_float,
    floats,
    in_dtype,
    in_float64,
    in_narrow,
    require_torch,
    tensor,
    view,
    without_fast_path,
)

__all__ = [
    "TorchCall", "Trace", "as_numpy", "call_module", "everything_in_float64", "exactly",
    "experts_one_by_one", "first_float", "gives_last_logits", "in_dtype", "in_float64", "in_narrow",
    "modules_of", "require_torch", "run", "tensor", "without_fast_path",
]  # fmt: skip


@dataclasses.dataclass
class Trace:
    """What one pass of a PyTorch model gave.

    Attributes:
        calls: the first call of every module, by path, in the order of calls.
        outputs: the float arrays of the whole model's result.
        padding: which tokens no attention may look at; empty where masks were not recorded.
        called: paths of all modules that were called, also of those that are not recorded.
    """

    calls: dict[str, TorchCall]
    outputs: list[np.ndarray]
    padding: Padding = dataclasses.field(default_factory=dict)
    called: set[str] = dataclasses.field(default_factory=set)


def run(
    module: Any,
    inputs: Sequence[Any],
    *,
    call: Callable[[Any, Sequence[Any]], Any] = lambda module, inputs: module(*inputs),
    keep: Callable[[str], bool] = lambda path: True,
    weights: bool = True,
) -> Trace:
    """Runs a PyTorch model once and records the calls of its modules.

    Args:
        module: the model, in the dtype to run in.
        inputs: its positional arguments: arrays, tensors, None.
        call: how to call it, given it and its inputs.
        keep: which modules to record, by path.
        weights: whether to record the weights and masks of attentions.
    """
    run_once = functools.partial(
        _run_once, module, inputs=inputs, call=call, keep=keep, weights=weights
    )
    trace, is_intact = run_once(copying=False)
    # A module may overwrite recorded tensors in place; then the records must be copies.
    return trace if is_intact else run_once(copying=True)[0]


def gives_last_logits(module: Any) -> bool:
    """Returns whether a model is called as nanoGPT's, ``forward(idx, targets=None)``.

    Without targets it gives the logits of the last position alone, and it has no cache.
    """
    return list(inspect.signature(module.forward).parameters) == ["idx", "targets"]


def call_module(module: Any, *inputs: Any) -> Any:
    """Calls a model whose user has not said how, so that it gives the logits of all positions."""
    if len(inputs) == 1 and gives_last_logits(module):
        # Any targets will do, as the loss is left out; it wants them in one piece.
        return module(inputs[0], inputs[0].contiguous())[0]
    return module(*inputs)


def _run_once(
    module: Any,
    *,
    inputs: Sequence[Any],
    call: Callable[[Any, Sequence[Any]], Any],
    keep: Callable[[str], bool],
    weights: bool,
    copying: bool,
) -> tuple[Trace, bool]:
    """Returns one pass, and whether all recorded arrays still hold what was recorded."""
    modules = modules_of(module)
    kept = {path: m for path, m in modules.items() if keep(owner_of(path, m))}
    recorder = CallRecorder(copying)
    tensors = [tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
    with (
        recorder.recording(kept, modules),
        recorder.recording_attention() if weights else contextlib.nullcontext(),
        require_torch().no_grad(),
        without_fast_path(),
    ):
        outputs = [view(value) for value in floats(call(module, tensors))]
    padding = find_padding(recorder.calls.values())
    return Trace(recorder.calls, outputs, padding, recorder.called), recorder.is_intact()


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """Makes a model in float64 compute everything in it, in the modules that it is made of."""
    with everything_in_float64(), without_fast_path():
        yield
