"""The classes of the five families through ``from_torch`` and ``to_torch``."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from jaxformer.errors import UsageError
from jaxformer.layers import Dropout
from jaxformer.parameters import get_parameters, merge, split
from jaxformer.porting.api import from_torch, to_torch
from parity_tests.families import charlm, encdec, prepost, unified
from parity_tests.family_cases import (
    MODULE_ROWS,
    SETTINGS,
    arguments_of,
    ids,
    normal,
    variants_of,
)
from parity_tests.family_rows import Row, defined_in, family_module, vocabulary
from parity_tests.harness import JAX
from parity_tests.verdict import judge_float64
from tests.support.ported_modules import (
    DTYPES,
    is_training,
    perturb,
    round_trip,
    run_source,
    run_target,
    same_bits,
    settings_of,
    state_of,
    to_tensor,
)
from tests.support.tiers import first_of_each, full_after

pytestmark = pytest.mark.usefixtures("float64")

MASKS = {"mask", "self_attn_mask", "cross_attn_mask", "cross_mask", "src_mask", "tgt_mask"}
CASES = [
    pytest.param(row, variant, id=f"{row}-{number}")
    for row in MODULE_ROWS
    for number, variant in enumerate(variants_of(row))
]
# Those that are constructed differently.
CONSTRUCTED = [case for case in CASES if case.id.endswith("-0") or case.values[1].keys() & SETTINGS]


def make(row: Row, variant: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(5)
    words = {**defined_in(family_module(row.family)), **SETTINGS, **variant}
    return eval(row.reference[0], words)


def boolean(family: str, mask: np.ndarray) -> np.ndarray:
    """A mask of a family as a boolean one, True = may attend."""
    return mask > -1e4 if family == "unified" else mask != 0


def inputs_of(row: Row, variant: dict[str, Any]) -> tuple[dict, dict, dict]:
    """The inputs of a row's call: arrays that may have gradients; masks; what is no array."""
    names = compile(row.reference[1], "", "eval").co_names
    arguments = {n: a for n, a in arguments_of(row, variant).items() if n in names}
    masks = {n: a for n, a in arguments.items() if n in MASKS and a is not None}
    rest = {n: a for n, a in arguments.items() if not isinstance(a, np.ndarray)}
    arrays = {n: a for n, a in arguments.items() if n not in masks and n not in rest}
    return arrays, masks, rest


def caller(row: Row, more: dict[str, Any], **settings: Any) -> Any:
    """The family's own call, of either side's module."""

    def call(module: Any, **arrays: Any) -> Any:
        words = {**SETTINGS, **more, **arrays, "module": lambda *a: module(*a, **settings)}
        return eval(row.reference[1], words)

    return call


@pytest.mark.parametrize(("row", "variant"), first_of_each(CASES, lambda row, _: row.family))
def test_a_module_computes_the_same(row, variant):
    source = perturb(make(row, variant)).eval()
    target = from_torch(source, row.family)
    assert not is_training(target)
    arrays, masks, rest = inputs_of(row, variant)
    tensors = {name: torch.from_numpy(mask) for name, mask in masks.items()}
    expected = run_source(source, caller(row, {**rest, **tensors}), arrays)
    ask = {"return_weights": True} if "weights.0" in expected else {}
    booleans = {name: boolean(row.family, mask) for name, mask in masks.items()}
    found = run_target(target, caller(row, {**rest, **booleans}, **ask), arrays, row.family)
    judge_float64(found, expected)


@functools.cache
def build_by_hand(row: Row) -> Any:
    built = eval(row.candidate[0], {**vocabulary(JAX), **SETTINGS})
    return built if isinstance(built, tuple) else (built, Dropout(0.0))


@pytest.mark.parametrize("row", first_of_each(MODULE_ROWS, lambda row: row.family), ids=str)
def test_settings_and_rates_are_those_of_the_module_built_by_hand(row):
    target = from_torch(make(row, {}).train(), row.family)
    built, dropout = build_by_hand(row)
    if hasattr(target, "dropout"):
        # Ours adds the rows to x and drops; built by hand these are two parts, or one.
        assert target.dropout.rate == dropout.rate
        del target.dropout
    assert settings_of(target) == settings_of(built)
    assert is_training(target) == is_training(built)


@pytest.mark.parametrize("row", MODULE_ROWS, ids=str)
def test_a_module_built_by_hand_goes_to_the_family(row):
    built, _ = build_by_hand(row)
    if row.family == "charlm" and row.name != "FeedForward":
        # Always causal; a jaxformer module is so only where it was imported so.
        with pytest.raises(UsageError, match="charlm has nothing that computes what"):
            to_torch(built, row.family)
        return
    source = make(row, {}).double()
    state = {name: to_tensor(array) for name, array in to_torch(built, row.family).items()}
    source.load_state_dict(state, strict=True)
    again = get_parameters(from_torch(source, row.family))
    for name, parameter in get_parameters(built).items():
        np.testing.assert_array_equal(parameter, again[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("row", "variant"), first_of_each(CONSTRUCTED, lambda row, _: row.family))
def test_a_module_comes_back_bit_for_bit(row, variant, dtype):
    source = perturb(make(row, variant)).eval()
    back = round_trip(source, row.family, dtype)
    fresh = make(row, variant).eval().to(getattr(torch, dtype))
    fresh.load_state_dict({name: to_tensor(array) for name, array in back.items()}, strict=True)
    if dtype in ("float32", "float64"):
        arrays, masks, rest = inputs_of(row, variant)
        tensors = {n: torch.from_numpy(np.array(a)) for n, a in {**arrays, **masks}.items()}
        tensors = {
            n: t.to(getattr(torch, dtype)) if t.is_floating_point() else t
            for n, t in tensors.items()
        }
        call = caller(row, rest)
        for one, other in zip(call(source, **tensors), call(fresh, **tensors), strict=True):
            assert torch.equal(one, other)


def told(row: Row, source: torch.nn.Module) -> dict[str, Any]:
    """The arguments of a constructor that shapes do not tell."""
    settings: dict[str, Any] = {"class": type(source).__name__, "num_heads": SETTINGS["num_heads"]}
    rates = {m.p for m in source.modules() if isinstance(m, torch.nn.Dropout)}
    settings["dropout"] = rates.pop() if rates else getattr(source, "dropout", 0.0)
    if row.name == "ALiBi":
        settings["num_heads"] = len(source.slopes)
    if row.name == "TransformerBlock" and row.family == "unified":
        settings["pre_norm"] = source.pre_norm
    if "ALiBi)" in row.reference[0]:
        settings |= {"positions": "alibi", "max_len": 8192}
    return settings


@pytest.mark.parametrize(("row", "variant"), first_of_each(CONSTRUCTED, lambda row, _: str(row)))
def test_arrays_alone_and_settings_make_the_same_module(row, variant):
    source = perturb(make(row, variant)).float()
    expected = from_torch(source.eval(), row.family)
    found = from_torch(state_of(source), row.family, told(row, source))
    assert type(found) is type(expected)
    assert settings_of(found) == settings_of(expected)
    target, alone = get_parameters(expected), get_parameters(found)
    assert target.keys() == alone.keys()
    for name, parameter in target.items():
        np.testing.assert_array_equal(parameter, alone[name])


@pytest.mark.parametrize(
    ("name", "value"),
    [("n_heads", 4), ("heads", 4), ("h", 4), ("nhead", 4), ("d_k", 6), ("head_size", 6)],
)
def test_heads_may_be_called_otherwise(name, value):
    source = prepost.MultiHeadAttention(24, 4)
    del source.num_heads, source.d_k
    with pytest.raises(UsageError, match="MultiHeadAttention has no num_heads or n_heads or"):
        from_torch(source, "prepost")
    setattr(source, name, value)
    assert from_torch(source, "prepost").num_heads == 4


def test_a_module_may_keep_its_config():
    settings = SETTINGS["config"]
    for kind in (charlm.AttentionHead, charlm.MultiHeadAttention, charlm.FeedForward, charlm.Block):
        source = kind(settings)
        # More layers than one of the modules has arrays.
        source.config = {**settings, "layers_num": 99}
        assert settings_of(from_torch(source, "charlm")) == settings_of(
            from_torch(kind(settings), "charlm")
        )


LONG: list[tuple[str, Any, Any]] = [
    ("encdec", lambda: encdec.PositionalEncoding(24), lambda: normal(2, 4999, 24)),
    ("encdec", lambda: encdec.Transformer(7, 9, 24, 4, 1, 1, 34),
     lambda: (ids(1, 600, below=7), ids(1, 500, below=9))),
    ("unified", lambda: unified.SinusoidalPE(24), lambda: normal(2, 8191, 24)),
    ("unified", lambda: unified.RoPE(10), lambda: normal(2, 3, 8191, 10)),
    ("unified", lambda: unified.Transformer(7, 24, 4, 2), lambda: ids(1, 600, below=7)),
    ("unified", lambda: unified.Transformer(7, 24, 4, 2, pos_enc_cls=unified.RoPE),
     lambda: ids(1, 600, below=7)),
]  # fmt: skip


@pytest.mark.parametrize(("family", "make", "inputs"), full_after(1, LONG))
def test_a_module_computes_with_the_tables_it_came_with(family, make, inputs):
    source = perturb(make()).eval()
    arrays = inputs()
    arrays = arrays if isinstance(arrays, tuple) else (arrays,)
    with torch.no_grad():
        expected = source(*map(torch.from_numpy, arrays)).numpy()
    target = from_torch(source, family)
    definition, parameters = split(target)
    # Taken apart and put together, as in training: where it came from is forgotten, not its tables.
    again = merge(definition, parameters)
    judge_float64({"output": np.asarray(again(*arrays))}, {"output": expected})
    same_bits(to_torch(again, family), state_of(source))
    # Equal tables make equal definitions, so that what was compiled for one serves the other.
    other = split(from_torch(source, family))[0]
    assert definition == other
    assert hash(definition) == hash(other)
    with torch.no_grad():
        next(source.buffers()).view(-1)[-1] += 1e-7
    assert definition != split(from_torch(source, family))[0]
