"""``torch.nn``'s attention, layers and stacks through ``from_torch`` and ``to_torch``."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from jaxformer.errors import UsageError
from jaxformer.layers import dropout_modules, inject_keep_masks
from jaxformer.parameters import get_parameters
from jaxformer.porting.api import from_torch
from parity_tests.verdict import judge_float64
from tests.support.ported_modules import (
    DTYPES,
    perturb,
    round_trip,
    run_source,
    run_target,
    settings_of,
    state_of,
    to_tensor,
)
from tests.support.tiers import first_of_each, full_after

# What torch says of layouts that its fast path does not serve.
pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]

B, T, S, D, N, F = 3, 7, 11, 24, 4, 34
RANDOM = np.random.default_rng(3)


def random_mask(*shape: int) -> np.ndarray:
    """True = may attend; every query may attend to the first key."""
    allowed = RANDOM.random(shape) < 0.65
    allowed[..., 0] = True
    return allowed


CAUSAL = np.tril(np.ones((T, T), bool))
MEMORY_MASK, MEMORY_PADDING = random_mask(T, S), random_mask(B, S)
PADDING = random_mask(B, T)
BY_HEAD = random_mask(B * N, T, S)


def layer(kind: str = "Encoder", **settings: Any) -> nn.Module:
    cls = nn.TransformerEncoderLayer if kind == "Encoder" else nn.TransformerDecoderLayer
    return cls(D, N, F, **{"dropout": 0.3, **settings})


def stack(kind: str, layers: int, norm: nn.Module | None = None, **settings: Any) -> nn.Module:
    cls = nn.TransformerEncoder if kind == "Encoder" else nn.TransformerDecoder
    return cls(layer(kind, **settings), layers, norm)


PLAIN: dict[str, Any] = {}
OTHER = {"norm_first": True, "activation": "gelu", "bias": False, "batch_first": True,
         "layer_norm_eps": 1e-3}  # fmt: skip
MAKERS = {
    "MultiheadAttention": lambda: nn.MultiheadAttention(D, N, 0.3),
    "MultiheadAttention-bare": lambda: nn.MultiheadAttention(D, N, bias=False, batch_first=True),
    "EncoderLayer": lambda: layer(),
    "EncoderLayer-other": lambda: layer(**OTHER),
    "EncoderLayer-silu": lambda: layer(activation=functional.silu, norm_first=True),
    "DecoderLayer": lambda: layer("Decoder", activation=nn.GELU("tanh")),
    "DecoderLayer-other": lambda: layer("Decoder", **OTHER),
    "Encoder": lambda: stack("Encoder", 3, nn.LayerNorm(D)),
    "Encoder-other": lambda: stack("Encoder", 2, **OTHER),
    "Encoder-eps": lambda: stack("Encoder", 2, nn.LayerNorm(D, 1e-6, bias=False)),
    # Where an activation is a module, a decoder's copies of its layer forget it and use relu.
    "Decoder-forgetful": lambda: stack("Decoder", 2, nn.LayerNorm(D), activation=nn.GELU("tanh")),
    "Decoder-other": lambda: stack("Decoder", 3, **OTHER),
    "Transformer": lambda: nn.Transformer(D, N, 2, 3, F, 0.3),
    "Transformer-other": lambda: nn.Transformer(D, N, 1, 2, F, 0.3, **OTHER),
}
# Positional arguments of each class after its inputs, in each of which True = may attend.
ATTENTION_CALLS = [
    (),
    (MEMORY_PADDING,),
    (None, True, MEMORY_MASK),
    (MEMORY_PADDING, True, BY_HEAD),
]
ENCODER_CALLS = [(), (CAUSAL,), (random_mask(B * N, T, T) | np.eye(T, dtype=bool), PADDING)]
DECODER_CALLS = [(), (CAUSAL, MEMORY_MASK, PADDING, MEMORY_PADDING), (None, BY_HEAD)]
BOTH_CALLS = [(), (random_mask(S, S), CAUSAL, MEMORY_MASK, MEMORY_PADDING, PADDING, MEMORY_PADDING)]


def inputs_of(source: nn.Module) -> dict[str, np.ndarray]:
    """Inputs in the module's layout."""
    kind = type(source).__name__
    attention = next(m for m in source.modules() if isinstance(m, nn.MultiheadAttention))
    random = np.random.default_rng(7)
    short, long, more = (random.standard_normal((B, n, D)) for n in (T, S, S))
    inputs = {"x": short}
    if kind == "MultiheadAttention":
        inputs |= {"key": long, "value": more}
    elif "Encoder" not in kind:
        inputs = {"src": long, "tgt": short} if kind == "Transformer" else {"x": short, "y": long}
    if attention.batch_first:
        return inputs
    return {name: array.swapaxes(0, 1) for name, array in inputs.items()}


def calls_of(source: nn.Module) -> list[tuple[Any, ...]]:
    kind = type(source).__name__
    if kind == "MultiheadAttention":
        return ATTENTION_CALLS
    return BOTH_CALLS if kind == "Transformer" else (
        ENCODER_CALLS if "Encoder" in kind else DECODER_CALLS
    )  # fmt: skip


def caller(more: tuple[Any, ...], *, source: bool) -> Any:
    """A call with positional arguments; torch's masks are True where jaxformer's are False."""

    def argument(value: Any) -> Any:
        return torch.from_numpy(~value) if source and isinstance(value, np.ndarray) else value

    def call(module: Any, **arrays: Any) -> Any:
        attention = hasattr(module, "head_dim")
        # An attention of torch's gives the weights of every head only if it is asked to.
        mean = {"average_attn_weights": False} if source and attention else {}
        ask = {"return_weights": True} if not source and attention else {}
        return module(*arrays.values(), *map(argument, more), **mean, **ask)

    return call


@pytest.mark.parametrize("name", full_after(3, MAKERS))
def test_a_module_computes_the_same(name):
    torch.manual_seed(5)
    source = perturb(MAKERS[name]()).eval()
    target = from_torch(source, "torch.nn")
    inputs = inputs_of(source)
    for more in calls_of(source):
        expected = run_source(source, caller(more, source=True), inputs)
        found = run_target(target, caller(more, source=False), inputs, "torch.nn")
        judge_float64(found, expected)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", first_of_each(DTYPES, lambda dtype: "all"))
def test_a_module_comes_back_bit_for_bit(name, dtype):
    source = perturb(MAKERS[name]()).eval()
    back = round_trip(source, "torch.nn", dtype)
    fresh = MAKERS[name]().eval().to(getattr(torch, dtype))
    fresh.load_state_dict({n: to_tensor(array) for n, array in back.items()}, strict=True)
    inputs = [
        torch.from_numpy(a.copy()).to(getattr(torch, dtype)) for a in inputs_of(fresh).values()
    ]
    with torch.no_grad():
        one, other = (module(*inputs) for module in (source, fresh))
    one, other = (r[0] if isinstance(r, tuple) else r for r in (one, other))
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", MAKERS)
def test_arrays_alone_and_settings_make_the_same_module(name):
    source = perturb(MAKERS[name]()).float().eval()
    settings = {"class": type(source).__name__, "nhead": N, "dropout": 0.3}
    settings |= OTHER if name.endswith("other") else {}
    settings |= {
        "EncoderLayer-silu": {"activation": "silu", "norm_first": True},
        "DecoderLayer": {"activation": nn.GELU("tanh")},
        "MultiheadAttention-bare": {"batch_first": True, "dropout": 0.0},
    }.get(name, {})
    expected = from_torch(source, "torch.nn")
    found = from_torch(state_of(source), "torch.nn", settings)
    if name == "Encoder-eps":
        # One eps for all is what a setting can say.
        assert (expected.final_norm.eps, found.final_norm.eps) == (1e-6, 1e-5)
        found.final_norm.eps = 1e-6
    assert type(found) is type(expected)
    assert settings_of(found) == settings_of(expected)
    assert getattr(found, "batch_first", None) == getattr(expected, "batch_first", None)
    for path, parameter in get_parameters(expected).items():
        np.testing.assert_array_equal(parameter, get_parameters(found)[path])


def rates_of(module: Any) -> dict[str, float]:
    return {path: place.rate for path, place in dropout_modules(module).items() if place.rate}


def test_rates_are_in_their_places():
    source = layer("Decoder").train()
    source.self_attn.dropout, source.multihead_attn.dropout, source.dropout.p = 0.1, 0.2, 0.4
    target = from_torch(source, "torch.nn")
    assert rates_of(target) == {
        "attention.attention_dropout": 0.1,
        "cross_attention.attention_dropout": 0.2,
        "feed_forward.hidden_dropout": 0.4,
        "attention_residual_dropout": 0.3,
        "cross_attention_residual_dropout": 0.3,
        "feed_forward_residual_dropout": 0.3,
    }
    assert not target.attention_residual_dropout.deterministic
    source.dropout2.p = 0.5
    with pytest.raises(UsageError, match="must have one dropout rate"):
        from_torch(source, "torch.nn")


def test_dropout_is_where_torch_drops(monkeypatch):
    """Both sides drop the same units: all of torch's draws are recorded and given to jaxformer."""
    source = perturb(layer("Encoder", norm_first=True, batch_first=True)).train()
    target = from_torch(source, "torch.nn")
    keep = {
        "attention.attention_dropout": (B, N, T, T),
        "attention_residual_dropout": (B, T, D),
        "feed_forward.hidden_dropout": (B, T, F),
        "feed_forward_residual_dropout": (B, T, D),
    }
    random = np.random.default_rng(17)
    masks = {path: random.random(shape) > 0.3 for path, shape in keep.items()}
    waiting = [masks[path] for path in keep]

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        kept = torch.from_numpy(waiting.pop(0)).reshape(x.shape)
        return torch.where(kept, x / (1 - p), 0)

    with monkeypatch.context() as patched:
        patched.setattr(functional, "dropout", dropout)
        # With its weights asked for, torch's attention takes the path whose dropout is visible.
        attention = source.self_attn.forward
        patched.setattr(source.self_attn, "forward",
                        lambda *a, **k: attention(*a, **{**k, "need_weights": True}))  # fmt: skip
        inputs = inputs_of(source)
        expected = source(torch.from_numpy(inputs["x"])).detach().numpy()
    assert not waiting
    inject_keep_masks(target, masks)
    judge_float64({"output": np.asarray(target(inputs["x"]))}, {"output": expected})


def test_causal_flags_and_the_mean_of_weights():
    source = perturb(nn.MultiheadAttention(D, N, batch_first=True)).eval()
    target = from_torch(source, "torch.nn")
    x = inputs_of(source)["x"]
    blocked = torch.from_numpy(~CAUSAL)
    tensor = torch.from_numpy(x)
    expected, weights = source(tensor, tensor, tensor, None, True, blocked, True, True)
    found, mean = target(x, x, x, None, True, None, True, True, return_weights=True)
    judge_float64(
        {"output": np.asarray(found), "weights": np.asarray(mean)},
        {"output": expected.detach().numpy(), "weights": weights.detach().numpy()},
    )
    np.testing.assert_array_equal(target(x, x, x, None, False, CAUSAL), found)
    both = from_torch(perturb(MAKERS["Transformer-other"]()).eval(), "torch.nn")
    y = RANDOM.standard_normal((B, S, D))
    np.testing.assert_array_equal(both(y, x, None, CAUSAL), both(y, x, tgt_is_causal=True))
    with pytest.raises(ValueError, match="inputs have three axes"):
        target(x[0], x[0], x[0])


def test_a_query_without_keys_gives_zeros_where_torch_gives_nan():
    source = perturb(nn.MultiheadAttention(D, N, bias=False, batch_first=True)).eval()
    target = from_torch(source, "torch.nn")
    x, mask = inputs_of(source)["x"], CAUSAL.copy()
    mask[2] = False
    tensor = torch.from_numpy(x)
    assert torch.isnan(source(tensor, tensor, tensor, attn_mask=torch.from_numpy(~mask))[0]).any()
    out = np.asarray(target(x, x, x, None, False, mask))
    assert np.isfinite(out).all()
    assert (out[:, 2] == 0).all()
