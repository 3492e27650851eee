"""What reaches no result is no bug; what the results lose is said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.segments.effects import seen_positions

pytestmark = pytest.mark.usefixtures("settings_of_jax")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 7, 5)).astype(np.float32)
MASK = np.ones((2, 7), np.int64)
MASK[1, :3] = 0


class Attention(torch.nn.Module):
    """Scores, a causal mask with padding, and a sum over what is seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query = torch.nn.Linear(5, 6)
        self.out = torch.nn.Linear(5, 4)

    def forward(self, x, attention_mask):
        q = self.query(x)
        seen = torch.ones(7, 7).tril().bool() & attention_mask[:, None].bool()
        scores = (q @ q.transpose(1, 2)).masked_fill(~seen, torch.finfo(q.dtype).min)
        return self.out(scores.softmax(-1) @ x)


def port(reference, at_padding=-1e9, scale=1.0):
    arrays = {n: p.detach().numpy() for n, p in reference.named_parameters()}

    def forward(params, x, attention_mask):
        q = x @ params["query.weight"].T + params["query.bias"]
        # A hidden token sees other keys here than in the reference: nobody reads what it gets.
        causal = jnp.where(jnp.tril(jnp.ones((7, 7))) > 0, 0.0, -jnp.inf)
        bias = jnp.where(attention_mask[:, None] > 0, 0.0, at_padding)
        weights = jax.nn.softmax(scale * (q @ q.swapaxes(1, 2)) + causal + bias)
        return (weights @ x) @ params["out.weight"].T + params["out.bias"]

    return forward, arrays


class KeyPadding(Attention):
    """True is padding, as in torch.nn."""

    def forward(self, x, key_padding_mask):
        return super().forward(x, ~key_padding_mask)


REFERENCE = Attention()
GIVEN = {"x": X, "attention_mask": MASK}


@pytest.mark.parametrize(
    ("reference", "given"),
    [
        (REFERENCE, GIVEN),
        (REFERENCE, [X, MASK]),
        (KeyPadding(), {"x": X, "key_padding_mask": MASK == 0}),
        (KeyPadding(), [X, MASK == 0]),
    ],
)
def test_what_is_computed_at_padding_is_not_judged(reference, given):
    report = compare(reference, port(reference), given, [X, MASK])
    assert report.verdict == "rounding", str(report)
    (remark,) = report.remarks
    assert "the results that are read stay the same" in remark
    assert "test_effects.py" in remark


def test_a_bug_that_is_read_beside_padding_is_found():
    report = compare(REFERENCE, port(REFERENCE, scale=0.5), GIVEN)
    assert report.verdict == "bug"
    assert report.root_causes[0].effect > 1e-3
    # The padding can be seen, so it is no longer padding alone that differs.
    report = compare(REFERENCE, port(REFERENCE, at_padding=-1.0), GIVEN)
    assert report.verdict == "bug"
    assert "the mask differs" in report.root_causes[0].diagnosis


@pytest.mark.parametrize(
    ("name", "array", "seen"),
    [
        ("attention_mask", [[1, 1, 0], [1, 0, 0], [0, 1, 1]], [0, 1, 3, 7, 8]),
        ("src_key_padding_mask", [[0, 0, 1], [0, 1, 1], [1, 0, 0]], [0, 1, 3, 7, 8]),
        # Of few texts of 1, 2 … tokens.
        ("mask", [[1, 0, 0], [1, 1, 0]], [0, 3, 4]),
        ("src_mask", [[1, 1, 0], [1, 0, 0], [0, 1, 1]], None),
        ("memory_key_padding_mask", [[1, 1, 0], [1, 0, 0], [0, 1, 1]], None),
        # Of scores, by its numbers.
        ("mask", [[1, 0, 0], [1, 1, 0], [1, 1, 1]], None),
        ("token_types", [[1, 1, 0], [1, 0, 0], [0, 1, 1]], None),
    ],
)
def test_which_inputs_are_masks_of_tokens(name, array, seen):
    tape = Tape(observe=lambda value: None)
    tape.add(np.array(array), "input", name)
    tape.outputs = [tape.add(np.zeros((len(array), 3, 4)), "constant")]
    (found,) = seen_positions(tape)
    assert (found if found is None else np.flatnonzero(found).tolist()) == seen


class Twins(torch.nn.Module):
    """Two results of one size."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.one(x), torch.tanh(self.two(x))


def test_results_of_one_size_are_compared_in_order():
    reference = Twins()
    arrays = {n: p.detach().numpy() for n, p in reference.named_parameters()}

    def forward(params, x, factor):
        one = x @ params["one.weight"].T + params["one.bias"]
        return one, jnp.tanh(factor * (x @ params["two.weight"].T + params["two.bias"]))

    right = compare(reference, (lambda p, x: forward(p, x, 1), arrays), X)
    assert right.verdict == "rounding"
    wrong = compare(reference, (lambda p, x: forward(p, x, 2), arrays), X)
    assert [c.diagnosis for c in wrong.root_causes] == [
        "the number 2 in mul must be 1: the reference has no such step"
    ]
