"""Padding on the left or right is no bug; the outputs of real tokens are still compared."""

import copy
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.parity.comparison.modules import compare_with
from jaxformer.parity.comparison.reference_run import ReferenceRun
from jaxformer.parity.matching.reference_attention import ReferenceAttention, used_rows
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.torch_recorder import Softmax
from tests.parity.test_mutants import assert_named, generator
from tests.support import mutants
from tests.support.subjects import B, D, F, Mutated, Subject, T, hugging_face, ids
from tests.support.tiers import first_of_each, full_except

pytestmark = pytest.mark.usefixtures("float64")

MASKS = {
    "right": np.arange(T) < np.array([[T], [T - 4]]),
    "left": np.arange(T) >= np.array([[0], [4]]),
    "right of all": np.arange(T) < np.array([[T - 3], [T - 5]]),
    "left of all": np.arange(T) >= np.array([[5], [3]]),
}
SIDES = list(MASKS)


def rows_shift(subject: Subject, candidate: Any, random: np.random.Generator) -> Mutated:
    """Gives each token the row of the next position."""

    def call(original: Any, self: Any, length: int, positions: Any = None) -> Any:
        places = jnp.arange(length)[None] if positions is None else positions
        return original(length, places + 1)

    mutants.replace_methods(candidate.position_embedding, __call__=call)
    return subject.mutated("position_embedding", "forward", "positions start at one")


MUTANTS = [
    mutants.eps, mutants.mask_shift, rows_shift, mutants.no_residual, mutants.scaled_gradient,
    mutants.one_element,
]  # fmt: skip
OF_PADDING = (mutants.mask_shift, rows_shift)


@pytest.fixture(scope="module", params=first_of_each(SIDES, lambda side: "all"))
def opt(request) -> Subject:
    """An OPT, which counts positions by its mask, with padding on one side."""
    seen = MASKS[request.param]
    found = hugging_face("OPTForCausalLM", "opt", ffn_dim=F, word_embed_proj_dim=D)
    found.name = request.param
    # OPT's layers hold the two projections of the feed-forward themselves.
    found.inside = ("feed_forward",)
    found.inputs = [ids(), seen.astype(np.int64)]
    found.jax_inputs = [ids(), seen[:, None, None, :]]
    found.call = lambda module, given: module(given[0], attention_mask=given[1])
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_is_no_bug(opt, dtype):
    report = compare_with(opt.reference, opt.candidate, opt.jax_inputs, dtype=dtype)
    assert not report.root_causes, [
        (n.path, n.stage, n.message, n.worst) for n in report.root_causes
    ]
    assert all(not n.in_context.is_bug for n in report if n.in_context is not None)
    remarks = [remark for remark in report.remarks if "counts positions by its mask" in remark]
    assert len(remarks) == ("left" in opt.name)


def test_the_forward_pass_alone(opt):
    reference = ReferenceRun(
        opt.torch_module, opt.inputs, dialect="opt", call=opt.call, backward=False
    )
    report = compare_with(reference, opt.candidate, opt.jax_inputs, dtype="float64")
    assert report.verdict == "rounding"


@pytest.mark.parametrize("mutate", full_except(MUTANTS, lambda mutate: mutate in OF_PADDING))
def test_a_mutant_with_padding_is_named(opt, mutate):
    candidate = opt.fresh()
    mutated = mutate(opt, candidate, generator(opt.name, mutate.__name__))
    assert_named(opt.compare(candidate), mutated)


def test_a_mutant_of_the_reference_is_named(opt):
    reference = copy.deepcopy(opt.torch_module)
    mutated = mutants.reference_output(opt, reference, generator(opt.name, "reference"))
    reference = ReferenceRun(reference, opt.inputs, dialect="opt", call=opt.call)
    assert_named(compare_with(reference, opt.candidate, opt.jax_inputs, dtype="float64"), mutated)


def test_positions_that_the_caller_gives_are_judged_at_real_tokens(opt):
    seen = MASKS[opt.name]
    counted = np.maximum(np.cumsum(seen, axis=1) - 1, 0)

    def calling(positions):
        return lambda module, given: module(*given, positions=jnp.asarray(positions))

    # What padding is given does not matter.
    anything = np.where(seen, counted, 7)
    assert opt.compare(opt.candidate, call=calling(anything)).verdict == "rounding"
    place = tuple(np.argwhere(seen)[-1])
    counted[place] += 1
    # The model hands them to its embedding, which does what it must.
    found = opt.compare(opt.candidate, call=calling(counted)).root_causes
    assert [node.path for node in found] == [""]


def states(allowed):
    """Returns a softmax of one head, given what was allowed (B, T, S)."""
    scores = np.where(allowed, 0.0, -np.inf)[:, None]
    return Softmax(0, Value(0, scores), Value(1, scores))


def find_padding(softmaxes):
    numbered = [one._replace(place=place + 1) for place, one in enumerate(softmaxes)]
    return ReferenceAttention(numbered).padding


CAUSAL = np.tril(np.ones((T, T), bool))


def test_padding_is_what_no_token_may_attend_to():
    seen = MASKS["right"]
    both_ways = np.broadcast_to(seen[:, None], (B, T, T))
    found = find_padding([states(CAUSAL & both_ways), states(both_ways)])
    np.testing.assert_array_equal(found[B, T], ~seen)
    np.testing.assert_array_equal(found[1, T], np.zeros((1, T), bool))
    everyone = find_padding([states(CAUSAL & MASKS["right of all"][:, None])])
    np.testing.assert_array_equal(everyone[1, T], (np.arange(T) >= T - 3)[None])


@pytest.mark.parametrize(
    "calls",
    [
        [states(np.broadcast_to(CAUSAL, (B, T, T)))],
        # Nothing at all is seen.
        [states(np.zeros((B, T, T), bool))],
        # Tokens see those before them, and not themselves: the last one is no padding.
        [states(np.broadcast_to(np.tril(CAUSAL, -1), (B, T, T)))],
        # One layer sees what the other does not, and a decoder what the encoder does not.
        [states(CAUSAL & MASKS["right"][:, None]), states(np.broadcast_to(CAUSAL, (B, T, T)))],
        [states(CAUSAL & MASKS["right"][:, None]), states(np.ones((B, T + 2, T), bool))],
        # Cross-attention alone: which queries are padding is not known.
        [states(np.broadcast_to(np.arange(T) < 5, (B, T + 2, T)))],
        [],
    ],
)  # fmt: skip
def test_without_padding_nothing_is_found(calls):
    assert find_padding(calls) == {}


def test_rows_are_dropped_only_from_arrays_of_the_tokens_shape():
    padding = find_padding([states(CAUSAL & MASKS["right"][:, None])])
    tokens, other = np.ones((B, T, D)), np.ones((B, D))
    (rows,) = used_rows(tokens, padding.values())
    assert rows.shape == (MASKS["right"].sum(), D)
    assert list(used_rows(other, padding.values())) == []
    idle = np.zeros((B, T), bool)
    idle[0, 0] = True
    (rows,) = used_rows(tokens, [*padding.values(), idle])
    assert rows.shape == (MASKS["right"].sum() - 1, D)
    (rows,) = used_rows(tokens, [idle])
    assert rows.shape == (B * T - 1, D)
    (rows,) = used_rows(tokens.swapaxes(0, 1), [idle])
    assert rows.shape == (B * T - 1, D)
