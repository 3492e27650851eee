"""Their side: one pass, with every sub-module's inputs, outputs and gradients."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.trace.memory import NOTABLE, release
from jaxformer.parity.trace.padding import Padding, padding_of, pulled_back
from jaxformer.parity.trace.torch_recorder import (
    Call,
    Watcher,
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
    "Call", "Trace", "as_numpy", "everything_in_float64", "first_float", "in_dtype",
    "in_float64", "in_narrow", "modules_of", "require_torch", "run",
]  # fmt: skip


@dataclasses.dataclass
class Trace:
    """All that one pass of their model showed.

    Attributes:
        calls: the first of every module, by path, in the order of calls.
        outputs: of the whole model, its float arrays.
        gradients: of every parameter, by name; of a tied one under each of its names what came
            through the module of that name. Empty without a backward pass.
        padding: which tokens no attention may look at; empty where masks were not noted.
    """

    calls: dict[str, Call]
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
    again: Callable[[], Any] | None = None,
) -> Trace:
    """One pass of their model.

    Args:
        module: theirs, in the dtype to run in.
        inputs: theirs.
        call: how it is called.
        cotangents: from the outputs, what to pull back through the model; None for no backward.
            Of padding, and of queries that may attend to no key, nothing is pulled back.
        keep: which modules to look at, by path.
        weights: whether to note the weights and masks of attentions.
        again: makes another copy of the module. Where it is given this one is used up: a weight is
            let go once its gradient is known, as the two together are the most there ever is.
    """
    args = (inputs, call, cotangents, keep, weights)
    with contextlib.nullcontext() if again is None else _used_up(module):
        trace, is_whole = _run(module, *args, copying=False)
    # Where a module wrote over what was noted the notes must be copies.
    return trace if is_whole else _run(again() if again else module, *args, copying=True)[0]


@contextlib.contextmanager
def _used_up(module: Any) -> Iterator[None]:
    """While it lasts, weights whose gradients have been summed up are let go."""
    empty = require_torch().empty(0)

    def let_go(parameter: Any) -> None:
        size = parameter.numel()
        parameter.data = empty.to(parameter.dtype)
        release(size, NOTABLE)

    hooks = [p.register_post_accumulate_grad_hook(let_go) for p in module.parameters()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _run(
    module: Any,
    inputs: Sequence[Any],
    call: Callable[[Any, Sequence[Any]], Any],
    cotangents: Callable[[list[np.ndarray]], list[np.ndarray]] | None,
    keep: Callable[[str], bool],
    weights: bool,
    *,
    copying: bool,
) -> tuple[Trace, bool]:
    """One pass, and whether all that was noted is as it was when it was noted."""
    torch = require_torch()
    backward = cotangents is not None
    modules = modules_of(module)
    kept = {path: m for path, m in modules.items() if keep(owner_of(path, m))}
    watcher = Watcher(backward, tied_parameters(modules, kept) if backward else {}, copying)
    tensors = [tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
    if backward:
        for leaf in [*tensors, *module.parameters()]:
            if is_float(leaf):
                leaf.requires_grad_()
    module.zero_grad(set_to_none=True)
    with (
        watcher.watching(kept),
        watcher.seeing_weights() if weights else contextlib.nullcontext(),
        torch.enable_grad() if backward else torch.no_grad(),
        _every_module_called(),
    ):
        results = floats(call(module, tensors))
        outputs = [watcher.array(value) for value in results]
        if cotangents is not None:
            calls = watcher.calls.values()
            wanted = pulled_back(cotangents(outputs), calls, padding_of(calls))
            pulled = zip(results, wanted, strict=False)
            pairs = [(f, torch.as_tensor(c).to(f.dtype)) for f, c in pulled if f.requires_grad]
            torch.autograd.backward([f for f, _ in pairs], [c for _, c in pairs])
    gradients = dict(watcher.shares)
    tied = {f"{path}.{leaf}" for path, leaves in watcher.tied.items() for leaf in leaves}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and name not in tied:
            gradients[name] = watcher.array(parameter.grad)
        parameter.grad = None
    padding = padding_of(watcher.calls.values())
    return Trace(watcher.calls, outputs, gradients, padding), watcher.is_whole()


@contextlib.contextmanager
def _every_module_called() -> Iterator[None]:
    """Without gradients torch.nn's encoder would go past its own modules."""
    mha = require_torch().backends.mha
    saved = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(saved)
