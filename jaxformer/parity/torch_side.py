"""Their side: one forward and backward pass with every sub-module's inputs, outputs and gradients.

This package is where torch may be imported; it comes with the extra ``torch``.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxformer.porting.arrays import tensors_of

# Methods that are called like modules, as in torch_ref: path of the module + name.
METHODS = ("attend",)
# Scores below the first are blocked, above the second allowed: masks add or fill in -1e9, the
# least number of the dtype, or minus infinity, and some old ones -1e4, as a real score might be.
BLOCKED, ALLOWED = -1e8, -5e3


@dataclasses.dataclass
class Call:
    """One call of one module.

    Attributes:
        order: its place among all calls.
        inputs: its float arrays, positional ones first.
        identities: of each input, a number that two have alike if they are one tensor.
        integers: its integer arrays, positional ones first.
        outputs: the float arrays of its result.
        input_gradients: of each input, through this call alone; None where it has none to give.
        output_gradients: of each output; None without a backward pass.
        weights: of attention, (B, N, T, S), if it computed such.
        allowed: who may attend to whom, of each attention that it computed.
        later: further calls of the same module.
    """

    order: int
    inputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    identities: list[int] = dataclasses.field(default_factory=list)
    integers: list[np.ndarray] = dataclasses.field(default_factory=list)
    outputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    input_gradients: list[np.ndarray | None] = dataclasses.field(default_factory=list)
    output_gradients: list[np.ndarray | None] = dataclasses.field(default_factory=list)
    weights: np.ndarray | None = None
    allowed: list[np.ndarray] = dataclasses.field(default_factory=list)
    later: list["Call"] = dataclasses.field(default_factory=list)

    @property
    def all(self) -> list["Call"]:
        """This call and the further ones."""
        return [self, *self.later]


@dataclasses.dataclass
class Trace:
    """All that one pass of their model showed.

    Attributes:
        calls: the first of every module, by path, in the order of calls.
        outputs: of the whole model, its float arrays.
        gradients: of every parameter, by name; of a tied one under each of its names what came
            through the module of that name. Empty without a backward pass.
    """

    calls: dict[str, Call]
    outputs: list[np.ndarray]
    gradients: dict[str, np.ndarray]


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


def modules_of(module: Any) -> dict[str, Any]:
    """All modules by path, and by path and name those that have methods called like modules."""
    found = {}
    for path, inner in module.named_modules():
        found[path] = inner
        for name in METHODS:
            if callable(getattr(inner, name, None)):
                found[f"{path}.{name}".lstrip(".")] = inner
    return found


def as_numpy(value: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    return _array(value) if hasattr(value, "untyped_storage") else value


def in_dtype(inputs: Sequence[Any], dtype: str) -> list[Any]:
    """Inputs with their floats in another dtype."""
    wanted = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return [
        x.astype(wanted) if isinstance(x, np.ndarray) and _is_float_dtype(x.dtype) else x
        for x in inputs
    ]


def run(
    module: Any,
    inputs: Sequence[Any],
    *,
    call: Callable[[Any, Sequence[Any]], Any] = lambda module, inputs: module(*inputs),
    cotangents: Callable[[list[np.ndarray]], list[np.ndarray]] | None = None,
    keep: Callable[[str], bool] = lambda path: True,
    weights: bool = True,
) -> Trace:
    """One pass of their model.

    Args:
        module: theirs, in the dtype to run in.
        inputs: theirs.
        call: how it is called.
        cotangents: from the outputs, what to pull back through the model; None for no backward.
            Of queries that may attend to no key nothing is pulled back.
        keep: which modules to look at, by path.
        weights: whether to note the weights and masks of attentions.
    """
    args = (module, inputs, call, cotangents, keep, weights)
    trace, is_whole = _run(*args, copying=False)
    # Where a module wrote over what was noted the notes must be copies.
    return trace if is_whole else _run(*args, copying=True)[0]


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
    kept = {path: m for path, m in modules.items() if keep(_owner(path, m))}
    watcher = _Watcher(backward, _tied(modules, kept) if backward else {}, copying)
    tensors = [_tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
    if backward:
        for tensor in [*tensors, *module.parameters()]:
            if _is_float(tensor):
                tensor.requires_grad_()
    module.zero_grad(set_to_none=True)
    with (
        watcher.watching(kept),
        watcher.seeing_weights() if weights else contextlib.nullcontext(),
        torch.enable_grad() if backward else torch.no_grad(),
        _every_module_called(),
    ):
        floats = _floats(call(module, tensors))
        outputs = [watcher.array(value) for value in floats]
        if cotangents is not None:
            pulled = zip(floats, _without_idle(cotangents(outputs), watcher.calls), strict=False)
            pairs = [(f, torch.as_tensor(c).to(f.dtype)) for f, c in pulled if f.requires_grad]
            torch.autograd.backward([f for f, _ in pairs], [c for _, c in pairs])
    gradients = dict(watcher.shares)
    tied = {f"{path}.{leaf}" for path, leaves in watcher.tied.items() for leaf in leaves}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and name not in tied:
            gradients[name] = watcher.array(parameter.grad)
        parameter.grad = None
    return Trace(watcher.calls, outputs, gradients), watcher.is_whole()


class _Watcher:
    """Notes what passes through modules while they run.

    Attributes:
        calls: the first of every module.
        shares: of tied parameters, the gradient that came through each of their modules.
    """

    def __init__(self, backward: bool, tied: Mapping[str, Sequence[str]], copying: bool):
        self.backward = backward
        self.tied = tied
        self.copying = copying
        # What was noted without a copy, and how often it had been written to.
        self.noted: list[tuple[Any, int]] = []
        self.calls: dict[str, Call] = {}
        self.shares: dict[str, np.ndarray] = {}
        self.count = 0
        self.running: list[Call] = []

    def array(self, tensor: Any) -> np.ndarray:
        """A tensor's numbers, where possible without a copy: activations are many."""
        if self.copying:
            return _array(tensor)
        self.noted.append((tensor, tensor._version))
        return _view(tensor)

    def is_whole(self) -> bool:
        """Whether nothing that was noted has been written to since; asked once, at the end."""
        whole = all(tensor._version == version for tensor, version in self.noted)
        # Tensors hold their hooks, and these the watcher.
        self.noted.clear()
        return whole

    def _put(self, gradients: list[np.ndarray | None], place: int, gradient: Any) -> None:
        gradients[place] = self.array(gradient)

    @contextlib.contextmanager
    def watching(self, modules: Mapping[str, Any]) -> Iterator[None]:
        """Notes the calls of these modules."""
        with contextlib.ExitStack() as stack:
            for path, module in modules.items():
                if _owner(path, module) != path:
                    name = path.rpartition(".")[2]
                    stack.enter_context(self._watching_method(path, module, name))
                    continue
                enter, leave = (functools.partial(f, path) for f in (self._enter, self._leave))
                before = module.register_forward_pre_hook(enter, with_kwargs=True)
                after = module.register_forward_hook(leave, with_kwargs=True, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    @contextlib.contextmanager
    def _watching_method(self, path: str, module: Any, name: str) -> Iterator[None]:
        original = getattr(module, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._enter(path, module, args, kwargs)
            output = None
            try:
                output = original(*args, **kwargs)
            finally:
                self._leave(path, module, args, kwargs, output)
            return output

        vars(module)[name] = method
        try:
            yield
        finally:
            del vars(module)[name]

    def _enter(self, path: str, module: Any, args: Any, kwargs: Any) -> Any:
        made = Call(self.count)
        self.count += 1
        self.running.append(made)
        if path in self.calls:
            self.calls[path].later.append(made)
        else:
            self.calls[path] = made
        for leaf in self.tied.get(path, ()):
            own = module._parameters[leaf]
            # An alias of its own: its gradient is what comes through this module alone.
            module._parameters[leaf] = self._share(f"{path}.{leaf}", own)
        return (
            tuple(self._note(made, value) for value in args),
            {name: self._note(made, value) for name, value in kwargs.items()},
        )

    def _leave(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        made = self.running.pop()
        for leaf in self.tied.get(path, ()):
            module._parameters[leaf] = module._parameters[leaf].aliased
        for value in _floats(output):
            made.outputs.append(self.array(value))
            made.output_gradients.append(None)
            if not self.backward:
                continue
            if not value.requires_grad:
                # What theirs cuts off is asked for too, so that it can be seen who cut it.
                value.requires_grad_()
            made.output_gradients[-1] = np.broadcast_to(0.0, tuple(value.shape))
            place = len(made.outputs) - 1
            value.register_hook(functools.partial(self._put, made.output_gradients, place))

    def _note(self, made: Call, value: Any) -> Any:
        """Notes one argument; of a float array that has a gradient an alias goes in."""
        if type(value) in (tuple, list):
            return type(value)(self._note(made, inner) for inner in value)
        if type(value) is dict:
            return {name: self._note(made, inner) for name, inner in value.items()}
        if _is_integer(value):
            made.integers.append(self.array(value))
        if not _is_float(value):
            return value
        made.inputs.append(self.array(value))
        made.identities.append(id(value))
        made.input_gradients.append(None)
        if not (self.backward and value.requires_grad):
            return value
        place = len(made.inputs) - 1
        made.input_gradients[place] = np.broadcast_to(0.0, tuple(value.shape))
        alias = value.view_as(value)
        alias.register_hook(functools.partial(self._put, made.input_gradients, place))
        return alias

    def _share(self, name: str, parameter: Any) -> Any:
        alias = parameter.view_as(parameter)
        alias.aliased = parameter

        def add(gradient: Any) -> None:
            before = self.shares.get(name)
            share = self.array(gradient)
            self.shares[name] = share if before is None else before + share

        alias.register_hook(add)
        return alias

    @contextlib.contextmanager
    def seeing_weights(self) -> Iterator[None]:
        """Notes the softmax of attentions."""
        torch = require_torch()
        functional = torch.nn.functional
        owners = ((functional, "softmax"), (torch, "softmax"), (torch.Tensor, "softmax"))
        saved = [getattr(owner, name) for owner, name in owners]
        fused = functional.scaled_dot_product_attention
        busy = False

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def softmax(scores: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal busy
                # One calls another.
                outermost, busy = not busy, True
                try:
                    result = original(scores, *args, **kwargs)
                finally:
                    busy = not outermost
                if outermost:
                    self._see(scores, result)
                return result

            return softmax

        @functools.wraps(fused)
        def attention(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            if query.dim() == 4:
                with torch.no_grad():
                    scores = _scores(query, key, *args, **kwargs)
                    self._see(scores, saved[1](scores, -1))
            return fused(query, key, *args, **kwargs)

        try:
            for (owner, name), original in zip(owners, saved, strict=True):
                setattr(owner, name, watch(original))
            functional.scaled_dot_product_attention = attention
            yield
        finally:
            functional.scaled_dot_product_attention = fused
            for (owner, name), original in zip(owners, saved, strict=True):
                setattr(owner, name, original)

    def _see(self, scores: Any, weights: Any) -> None:
        if not self.running or weights.dim() != 4:
            return
        made = self.running[-1]
        made.weights = self.array(weights) if made.weights is None else made.weights
        scores = _view(scores)
        made.allowed.append((scores > ALLOWED).astype(np.int8) - (scores < BLOCKED))


def _owner(path: str, module: Any) -> str:
    """The path of the module, where a path of ``modules_of`` ends in one of its methods."""
    owner, _, name = path.rpartition(".")
    return owner if name in METHODS and callable(getattr(module, name, None)) else path


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


def idle_queries(call: Call) -> np.ndarray | None:
    """Which queries (B, T) may attend to no key in an attention of the call, if any."""
    found: Any = None
    for state in call.allowed:
        idle = (state < 0).all(axis=(1, 3))
        if idle.any() and (found is None or found.shape == idle.shape):
            found = idle if found is None else found | idle
    return found


def _without_idle(cotangents: Sequence[np.ndarray], calls: Mapping[str, Call]) -> list[np.ndarray]:
    """What comes out of queries that see nothing is padding: each code base has its own way."""
    result = []
    for cotangent in cotangents:
        for call in calls.values():
            idle = idle_queries(call)
            for rows in () if idle is None else (idle, idle.T):
                if cotangent.shape[:2] == rows.shape:
                    cotangent = np.where(
                        rows.reshape(*rows.shape, *[1] * (cotangent.ndim - 2)), 0.0, cotangent
                    )
                    break
        result.append(cotangent)
    return result


def _tied(modules: Mapping[str, Any], kept: Container[str]) -> dict[str, list[str]]:
    """The parameters that are used in several places, by the path of those that are kept."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for path, inner in modules.items():
        for leaf, parameter in inner._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((path, leaf))
    tied: dict[str, list[str]] = {}
    for places in holders.values():
        for path, leaf in places if len(places) > 1 else ():
            if path in kept:
                tied.setdefault(path, []).append(leaf)
    return tied


def _scores(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """What ``scaled_dot_product_attention`` takes the softmax of."""
    torch = require_torch()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(-2, -1)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -torch.inf)
    return scores + attn_mask


def first_float(output: Any) -> Any:
    """The first float tensor of a result: a model's logits, however it wraps them."""
    return output.logits if hasattr(output, "logits") else _floats(output)[0]


def _is_float_dtype(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def _is_float(value: Any) -> bool:
    return hasattr(value, "untyped_storage") and value.dtype.is_floating_point


def _is_integer(value: Any) -> bool:
    return (
        hasattr(value, "untyped_storage")
        and not value.dtype.is_floating_point
        and str(value.dtype).startswith("torch.int")
    )


def _floats(value: Any) -> list[Any]:
    """The float tensors of a result, in order, however it is nested."""
    if _is_float(value):
        return [value]
    if type(value) is dict:
        # JAX takes them in the order of their names.
        value = [value[name] for name in sorted(value)]
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for inner in value for tensor in _floats(inner)]
    return []


def _tensor(array: np.ndarray) -> Any:
    torch = require_torch()
    # A copy: it may be a view that must not be written to.
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _view(tensor: Any) -> np.ndarray:
    """The numbers of a tensor, shared with it where it is in the processor's memory."""
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.view(require_torch().int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _array(tensor: Any) -> np.ndarray:
    """A copy of the numbers of a tensor."""
    return tensors_of({"": tensor})[""].read()
