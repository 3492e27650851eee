"""What a dtype rounds, of any candidate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jaxformer.errors import UsageError
from jaxformer.parity import compare
from tests.parity.matching.test_module_pairs import LinenMlp, as_arrays
from tests.parity.test_user_modules import CandidateMlp, D, ReferenceMlp
from tests.support.subjects import hidden, randomize

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def reference():
    return randomize(ReferenceMlp())


def remarks(report, dtype):
    return [remark for remark in report.remarks if remark.startswith(f"in {dtype} ")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["nnx", "linen", "function"])
def test_both_sides_round_alike(reference, kind, dtype):
    candidate = {
        "nnx": lambda: CandidateMlp(reference),
        "linen": lambda: (LinenMlp(), as_arrays(reference)),
        "function": lambda: (LinenMlp().apply, as_arrays(reference)),
    }[kind]()
    report = compare(reference, candidate, [hidden()], backward=False, dtype=dtype)
    assert report.dtype == dtype
    assert report.verdict == "rounding"
    (results,) = remarks(report, dtype)
    assert results.startswith(f"in {dtype} the two sides are up to ")
    measured = {node.reference_path: node.in_context for node in report}
    with_modules = {"", "norm", "first", "second"} if kind != "function" else {""}
    roundoff = float(jnp.finfo(dtype).eps) / 2
    for path, found in measured.items():
        if path not in with_modules:
            assert found.candidate_rounding is None
            continue
        assert 0.05 * roundoff < found.candidate_rounding < 10 * roundoff
        assert 1 / 3 < found.candidate_rounding / found.reference_rounding < 3
        assert found.ulps < 50


class Narrow(CandidateMlp):
    """Its norm computes in fewer bits than the reference's."""

    def __call__(self, x):
        inner = self.ln(x.astype(jnp.bfloat16)).astype(x.dtype)
        return x + self.down(jax.nn.relu(self.up(inner)))


def test_the_module_that_rounds_more_is_named(reference):
    candidate = Narrow(reference)
    report = compare(reference, candidate, [hidden()], backward=False, dtype="float32")
    _, more = remarks(report, "float32")
    start = "in float32 the candidate rounds more than the reference, seen first in what ln returns"
    assert more.startswith(start)
    assert compare(reference, candidate, [hidden()], backward=False).dtype == "float64"


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x, attention_mask):
        return self.linear(x)


def test_padding_is_left_out():
    torch.manual_seed(0)
    reference = Masked()
    mask = np.ones(hidden().shape[:2], np.int64)
    mask[0, 3:] = 0

    def candidate(parameters, x, attention_mask):
        made = x @ parameters["kernel"] + parameters["bias"][None, None]
        # Far less exact, where nobody looks.
        rough = jnp.float32(made.astype(jnp.bfloat16)).astype(made.dtype)
        return jnp.where(attention_mask[..., None] == 1, made, rough)

    linear = reference.linear
    parameters = {
        "kernel": linear.weight.detach().numpy().T,
        "bias": linear.bias.detach().numpy(),
    }
    given = {"x": hidden(), "attention_mask": mask}
    report = compare(reference, (candidate, parameters), given, backward=False, dtype="float32")
    (results,) = remarks(report, "float32")
    (root, *_) = report.nodes
    assert root.in_context.candidate_rounding < 1e-6
    assert "e-08" in results or "e-07" in results


def test_a_dtype_that_a_model_does_not_take(reference):
    def candidate(parameters, x):
        assert x.dtype != jnp.float16, "no float16 here"
        return LinenMlp().apply(parameters, x)

    with pytest.raises(UsageError, match=r"dtype must be one of float64, float32, .*: got 'int8'"):
        compare(reference, (candidate, as_arrays(reference)), [hidden()], dtype="int8")
    report = compare(reference, (candidate, as_arrays(reference)), [hidden()], dtype="float16")
    assert report.verdict == "rounding"
    assert report.dtype == "float64"
    assert report.remarks[-1] == (
        "what float16 rounds was not measured: AssertionError: no float16 here"
    )


def test_of_a_function_no_module_is_named(reference):
    def candidate(parameters, x):
        return LinenMlp().apply(parameters, x).astype(jnp.bfloat16).astype(x.dtype)

    arrays = as_arrays(reference)
    report = compare(reference, (candidate, arrays), [hidden()], backward=False, dtype="float32")
    _, more = remarks(report, "float32")
    assert more.startswith("in float32 the candidate rounds more than the reference: it is off by ")


class Lookup(nn.Module):
    """Looks rows up, which rounds nothing, and returns two results."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(9, D), nn.Linear(D, D)

    def forward(self, ids):
        x = self.table(ids)
        return x, self.linear(x) * 3e5


class CandidateLookup(nnx.Module):
    def __init__(self, reference):
        self.table = Rough(9, D, rngs=nnx.Rngs(0))
        self.table.embedding.set_value(jnp.asarray(reference.table.weight.detach().numpy()))
        self.linear = nnx.Linear(D, D, rngs=nnx.Rngs(0))
        self.linear.kernel.set_value(jnp.asarray(reference.linear.weight.detach().numpy().T))
        self.linear.bias.set_value(jnp.asarray(reference.linear.bias.detach().numpy()))

    def __call__(self, ids):
        x = self.table(ids)
        return x, self.linear(x) * 3e5


class Rough(nnx.Embed):
    def __call__(self, ids):
        rows = super().__call__(ids)
        return rows.astype(jnp.bfloat16).astype(rows.dtype)


def test_each_result_has_a_sentence_and_a_lookup_is_exact():
    torch.manual_seed(0)
    reference = Lookup()
    candidate = CandidateLookup(reference)
    ids = np.arange(6).reshape(2, 3)
    report = compare(reference, candidate, [ids], backward=False, dtype="float32")
    first, second, more = remarks(report, "float32")
    assert " apart in result 0, where" in first
    assert " apart in result 1, where" in second
    assert "seen first in what table returns" in more
    report = compare(reference, candidate, [ids], backward=False, dtype="float16")
    _, second, *_ = remarks(report, "float16")
    assert "numbers of result 1 of the candidate are not finite, and " in second
