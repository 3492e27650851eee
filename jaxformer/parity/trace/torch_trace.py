"""One pass of a PyTorch model, with the inputs, outputs and gradients of every submodule."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.trace.memory import NOTABLE, release
from jaxformer.parity.trace.padding import Padding, find_padding, mask_cotangents
from jaxformer.parity.trace.torch_recorder import (
    CallRecorder,
    TorchCall,
    modules_of,
    owner_of,
    tied_parameters,
)
from jaxformer.parity.trace.torch_values import (
    as_numpy,
    everything_in_float64,
    first_float,
    floats,
    in_dtype,
    in_float64,
    in_narrow,
    is_float,
    require_torch,
    tensor,
)

__all__ = [
    "TorchCall", "Trace", "as_numpy", "call_module", "everything_in_float64", "first_float",
    "freeing_weights", "gives_last_logits", "in_dtype", "in_float64", "in_narrow", "modules_of",
    "require_torch", "run", "tensor", "without_fast_path",
]  # fmt: skip


@dataclasses.dataclass
class Trace:
    """What one pass of a PyTorch model gave.

    Attributes:
        calls: the first call of every module, by path, in the order of calls.
        outputs: the float arrays of the whole model's result.
        gradients: of every parameter, by name; a tied parameter has under each of its names the
            gradient that came through the module of that name. Empty without a backward pass.
        padding: which tokens no attention may look at; empty where masks were not recorded.
    """

    calls: dict[str, TorchCall]
    outputs: list[np.ndarray]
    gradients: dict[str, np.ndarray]
    padding: Padding = dataclasses.field(default_factory=dict)


def run(
    module: Any,
    inputs: Sequence[Any],
    *,
    call: Callable[[Any, Sequence[Any]], Any] = lambda module, inputs: module(*inputs),
    cotangents: Callable[[list[np.ndarray]], list[np.ndarray]] | None = None,
    keep: Callable[[str], bool] = lambda path: True,
    weights: bool = True,
    copy_module: Callable[[], Any] | None = None,
) -> Trace:
    """Runs a PyTorch model once and records the calls of its modules.

    Args:
        module: the model, in the dtype to run in.
        inputs: its positional arguments: arrays, tensors, None.
        call: how to call it, given it and its inputs.
        cotangents: makes from the outputs the gradients to pull back; None for no backward pass.
            They are set to zero for padding and for queries that may attend to no key.
        keep: which modules to record, by path.
        weights: whether to record the weights and masks of attentions.
        copy_module: makes another copy of the module. If given, ``module`` is used up: each weight
            is freed once its gradient is known, because both together are the peak of memory.
    """
    run_once = functools.partial(
        _run_once, inputs=inputs, call=call, cotangents=cotangents, keep=keep, weights=weights
    )
    with contextlib.nullcontext() if copy_module is None else freeing_weights(module):
        trace, is_intact = run_once(module, copying=False)
    if is_intact:
        return trace
    # A module overwrote recorded tensors in place, so the records must be copies.
    return run_once(copy_module() if copy_module else module, copying=True)[0]


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


@contextlib.contextmanager
def freeing_weights(module: Any) -> Iterator[None]:
    """Frees each weight once its gradient is complete, inside the ``with`` block."""
    empty = require_torch().empty(0)

    def free(parameter: Any) -> None:
        size = parameter.numel()
        parameter.data = empty.to(parameter.dtype)
        release(size, NOTABLE)

    hooks = [p.register_post_accumulate_grad_hook(free) for p in module.parameters()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _run_once(
    module: Any,
    *,
    inputs: Sequence[Any],
    call: Callable[[Any, Sequence[Any]], Any],
    cotangents: Callable[[list[np.ndarray]], list[np.ndarray]] | None,
    keep: Callable[[str], bool],
    weights: bool,
    copying: bool,
) -> tuple[Trace, bool]:
    """Returns one pass, and whether all recorded arrays still hold what was recorded."""
    torch = require_torch()
    backward = cotangents is not None
    modules = modules_of(module)
    kept = {path: m for path, m in modules.items() if keep(owner_of(path, m))}
    recorder = CallRecorder(backward, tied_parameters(modules, kept) if backward else {}, copying)
    tensors = [tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
    if backward:
        for leaf in [*tensors, *module.parameters()]:
            if is_float(leaf):
                leaf.requires_grad_()
    module.zero_grad(set_to_none=True)
    with (
        recorder.recording(kept),
        recorder.recording_attention() if weights else contextlib.nullcontext(),
        torch.enable_grad() if backward else torch.no_grad(),
        without_fast_path(),
    ):
        results = floats(call(module, tensors))
        outputs = [recorder.array(value) for value in results]
        if cotangents is not None:
            calls = recorder.calls.values()
            wanted = mask_cotangents(cotangents(outputs), calls, find_padding(calls))
            pulled = zip(results, wanted, strict=False)
            pairs = [(f, torch.as_tensor(c).to(f.dtype)) for f, c in pulled if f.requires_grad]
            torch.autograd.backward([f for f, _ in pairs], [c for _, c in pairs])
    gradients = dict(recorder.shares)
    tied = {f"{path}.{leaf}" for path, leaves in recorder.tied.items() for leaf in leaves}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and name not in tied:
            gradients[name] = recorder.array(parameter.grad)
        parameter.grad = None
    padding = find_padding(recorder.calls.values())
    return Trace(recorder.calls, outputs, gradients, padding), recorder.is_intact()


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
