"""Records the calls of PyTorch modules while a model runs, with hooks on each module."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxformer.parity.recording import torch_values
from jaxformer.parity.recording.calls.attention import RecordedWeights, attention_scores
from jaxformer.parity.recording.reference_modules import owner_of

# Scores below BLOCKED are masked out, above ALLOWED they are not: masks add or fill in -1e9, the
# dtype's minimum, or minus infinity, and some old ones -1e4, which a real score might also be.
BLOCKED, ALLOWED = -1e8, -5e3


@dataclasses.dataclass
class TorchCall:
    """One call of one PyTorch module.

    Attributes:
        order: its place among all calls of the pass.
        args: positional arguments, as they were given.
        kwargs: named arguments.
        output: whatever it returned.
        inputs: the float arrays among the arguments, positional ones first.
        identities: of each input, a number that is equal for inputs that are one tensor.
        integers: its integer arrays, positional ones first.
        positions: its argument ``position_ids``, if there was one.
        outputs: the float arrays of its result.
        integer_outputs: its integer arrays: which experts a router chose.
        input_gradients: of each input, through this call alone; empty where they are not known.
        output_gradients: of each output, None for zero; empty where they are not known.
        is_copied: whether what was recorded are copies, because something writes to the tensors.
        weights: of its attention, if it computed any.
        allowed: of each attention in it, (B, N, T, S): 1 where a query may attend to a key, -1
            where it may not, 0 where the score does not tell.
        later: further calls of the same module.
    """

    order: int
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    output: Any = None
    inputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    identities: list[int] = dataclasses.field(default_factory=list)
    integers: list[np.ndarray] = dataclasses.field(default_factory=list)
    positions: np.ndarray | None = None
    outputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    integer_outputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    input_gradients: list[np.ndarray | None] = dataclasses.field(default_factory=list)
    output_gradients: list[np.ndarray | None] = dataclasses.field(default_factory=list)
    is_copied: bool = False
    weights: RecordedWeights | None = None
    allowed: list[np.ndarray] = dataclasses.field(default_factory=list)
    later: list["TorchCall"] = dataclasses.field(default_factory=list)

    @property
    def all(self) -> list["TorchCall"]:
        """This call and the further ones."""
        return [self, *self.later]

    def free(self) -> None:
        """Forgets all arrays."""
        self.args, self.kwargs, self.output = (), {}, None
        self.inputs, self.outputs = [], []
        self.integers, self.integer_outputs = [], []


def tensors_in_order(value: Any) -> Iterator[Any]:
    """Yields the tensors among arguments, in the order in which they were given."""
    if hasattr(value, "untyped_storage"):
        yield value
    for inner in value.values() if isinstance(value, dict) else ():
        yield from tensors_in_order(inner)
    for inner in value if isinstance(value, tuple | list) else ():
        yield from tensors_in_order(inner)


def copied(tree: Any, copy_tensor: Callable[[Any], Any]) -> Any:
    """Returns a nested value with copies of its tensors; what is one tensor stays one.

    Of what is no tensor there is a copy too, as a call may write to it: to a cache of keys.
    """
    torch = torch_values.require_torch()
    copies: dict[int, Any] = {}

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in copies:
                copies[id(leaf)] = copy_tensor(leaf)
            return copies[id(leaf)]
        is_plain = leaf is None or isinstance(leaf, bool | int | float | str)
        is_code = callable(leaf) or isinstance(leaf, torch.nn.Module)
        return leaf if is_plain or is_code else copy.deepcopy(leaf)

    original = torch.Tensor.__deepcopy__
    # The tensors that a cache holds are shared: each layer would have a copy of all others'.
    torch.Tensor.__deepcopy__ = lambda self, memo: self.detach()
    try:
        return torch.utils._pytree.tree_map(copy_leaf, tree)
    finally:
        torch.Tensor.__deepcopy__ = original


class CallRecorder:
    """Records the calls of modules.

    Args:
        copying: whether to copy arrays; otherwise they share memory with the tensors.

    Attributes:
        calls: the first call of every module, by path.
        called: paths of all modules that were called, also of those that are not recorded.
    """

    def __init__(self, copying: bool):
        self.copying = copying
        # Tensors recorded without a copy, and how often each had been written to by then.
        self.uncopied: list[tuple[Any, int]] = []
        self.calls: dict[str, TorchCall] = {}
        self.called: set[str] = set()
        self.count = 0
        self.running: list[TorchCall] = []
        # Of each running call: what was kept of its arguments, and how often each had been written
        # to, by the identity of the tensor.
        self._given: list[dict[int, tuple[Any, int]]] = []

    def _kept(self, tensor: Any) -> Any:
        """Returns a tensor to keep, without a copy where possible: activations are large."""
        if self.copying:
            return tensor.detach().clone()
        self.uncopied.append((tensor, tensor._version))
        return tensor.detach()

    def is_intact(self) -> bool:
        """Returns whether no recorded tensor was overwritten later; call it once, at the end."""
        intact = all(tensor._version == version for tensor, version in self.uncopied)
        self.uncopied.clear()
        return intact

    @contextlib.contextmanager
    def recording(self, modules: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[None]:
        """Records the calls of modules inside the ``with`` block.

        Args:
            modules: by path.
            others: modules of which only the paths are noted, if they are called.
        """

        def note(module: Any, args: Any, path: str) -> None:
            self.called.add(path)

        with contextlib.ExitStack() as stack:
            for path, module in others.items():
                if path not in modules and owner_of(path, module) == path:
                    hook = functools.partial(note, path=path)
                    stack.callback(module.register_forward_pre_hook(hook).remove)
            for path, module in modules.items():
                if owner_of(path, module) != path:
                    name = path.rpartition(".")[2]
                    stack.enter_context(self._recording_method(path, module, name))
                    continue
                before = functools.partial(self._before_call, path)
                for handle in (
                    # A call begins before the module's own hooks, and ends after them.
                    module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                    module.register_forward_hook(self._after_call, always_call=True),
                ):
                    stack.callback(handle.remove)
            yield

    @contextlib.contextmanager
    def _recording_method(self, path: str, module: Any, name: str) -> Iterator[None]:
        original = getattr(module, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            self._before_call(path, module, args, kwargs)
            output = None
            try:
                output = original(*args, **kwargs)
            finally:
                self._after_call(module, args, output)
            return output

        vars(module)[name] = method
        try:
            yield
        finally:
            del vars(module)[name]

    def _before_call(self, path: str, module: Any, args: Any, kwargs: Any) -> None:
        given: dict[int, tuple[Any, int]] = {}

        def keep(tensor: Any) -> Any:
            given[id(tensor)] = self._kept(tensor), tensor._version
            return given[id(tensor)][0]

        own_args, own_kwargs = copied((args, kwargs), keep)
        made = TorchCall(self.count, own_args, own_kwargs, is_copied=self.copying)
        self._given.append(given)
        self.count += 1
        self.called.add(path)
        self.running.append(made)
        if path in self.calls:
            self.calls[path].later.append(made)
        else:
            self.calls[path] = made
        if torch_values.is_integer(kwargs.get("position_ids")):
            made.positions = torch_values.view(made.kwargs["position_ids"])
        for value in tensors_in_order((made.args, made.kwargs)):
            if torch_values.is_integer(value):
                made.integers.append(torch_values.view(value))
            if torch_values.is_float(value):
                made.inputs.append(torch_values.view(value))
                made.identities.append(id(value))

    def _after_call(self, module: Any, args: Any, output: Any) -> None:
        made = self.running.pop()
        given = self._given.pop()

        def keep(tensor: Any) -> Any:
            # What a call only passes on stays one tensor.
            kept, version = given.get(id(tensor), (None, -1))
            return kept if version == tensor._version else self._kept(tensor)

        made.output = copied(output, keep)
        made.integer_outputs = [*map(torch_values.view, torch_values.integers(made.output))]
        made.outputs = [*map(torch_values.view, torch_values.floats(made.output))]

    @contextlib.contextmanager
    def recording_attention(self) -> Iterator[None]:
        """Records attention weights and masks, from every softmax inside the ``with`` block."""
        torch = torch_values.require_torch()
        functional = torch.nn.functional
        owners = ((functional, "softmax"), (torch, "softmax"), (torch.Tensor, "softmax"))
        saved = [getattr(owner, name) for owner, name in owners]
        fused = functional.scaled_dot_product_attention
        busy = False

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def softmax(scores: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal busy
                # One of these functions calls another.
                outermost, busy = not busy, True
                try:
                    result = original(scores, *args, **kwargs)
                finally:
                    busy = not outermost
                if outermost:
                    self._record_attention(scores, result)
                return result

            return softmax

        @functools.wraps(fused)
        def attention(
            query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            if query.dim() == 4:
                with torch.no_grad():
                    scores = attention_scores(query, key, attn_mask, *args, **kwargs)
                    self._record_attention(scores, saved[1](scores, -1))
            return fused(query, key, value, attn_mask, dropout_p, *args, **kwargs)

        try:
            for (owner, name), original in zip(owners, saved, strict=True):
                setattr(owner, name, wrap(original))
            functional.scaled_dot_product_attention = attention
            yield
        finally:
            functional.scaled_dot_product_attention = fused
            for (owner, name), original in zip(owners, saved, strict=True):
                setattr(owner, name, original)

    def _record_attention(self, scores: Any, weights: Any) -> None:
        if not self.running or weights.dim() != 4:
            return
        made = self.running[-1]
        made.weights = made.weights or RecordedWeights.of(torch_values.view(weights))
        scores = torch_values.view(scores)
        made.allowed.append((scores > ALLOWED).astype(np.int8) - (scores < BLOCKED))
