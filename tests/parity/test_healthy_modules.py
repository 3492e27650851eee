"""Healthy modules that are hard to run by themselves: caches, other layouts, x64; no alarm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jaxformer.parity import compare
from tests.parity.test_user_modules import (
    NAMES,
    CandidateMlp,
    D,
    ReferenceMlp,
    root_causes,
)
from tests.support.subjects import hidden, randomize

pytestmark = pytest.mark.usefixtures("float64")


def linear(reference):
    """A Linear of NNX with the weights of one of PyTorch."""
    made = nnx.Linear(reference.in_features, reference.out_features, rngs=nnx.Rngs(0))
    made.kernel.set_value(jnp.asarray(reference.weight.detach().numpy().T))
    made.bias.set_value(jnp.asarray(reference.bias.detach().numpy()))
    return made


class ReferenceStep(nn.Module):
    """Attends to what it has seen: once in its own state, once in a list that it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("total", torch.zeros(2, D))

    def forward(self, x, cache):
        cache.append(self.linear(x))
        self.total = self.total + torch.tanh(cache[-1])
        return torch.stack(cache).mean(0) * self.total


class ReferenceDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = ReferenceStep()

    def forward(self, x):
        cache = []
        return torch.stack([self.step(x[:, n], cache) for n in range(4)], 1)


class CandidateStep(nnx.Module):
    def __init__(self, reference):
        self.linear = linear(reference.linear)
        self.total = nnx.Cache(jnp.zeros((2, D)))

    def __call__(self, x, cache):
        cache.append(self.linear(x))
        self.total.set_value(self.total[...] + jnp.tanh(cache[-1]))
        return jnp.stack(cache).mean(0) * self.total[...]


class CandidateDecoder(nnx.Module):
    step_class = CandidateStep

    def __init__(self, reference):
        self.step = self.step_class(reference.step)

    def __call__(self, x):
        cache = []
        return jnp.stack([self.step(x[:, n], cache) for n in range(4)], 1)


class ForgetfulStep(CandidateStep):
    """Is right in its first two calls."""

    def __call__(self, x, cache):
        result = super().__call__(x, cache)
        return result if len(cache) < 3 else result * 1.01


class ForgetfulDecoder(CandidateDecoder):
    step_class = ForgetfulStep


DECODER = {"step": "step", "step.linear": "step.linear"}


@pytest.mark.tier("full")
def test_stateful_arguments_are_restored_and_later_calls_are_judged():
    reference = randomize(ReferenceDecoder())
    report = compare(reference, CandidateDecoder(reference), [hidden()], names=DECODER)
    assert report.verdict == "rounding", str(report)
    # Gradients come back through the caches, too.
    assert report.coverage.gradients[0] == report.coverage.gradients[1] > 2
    report = compare(reference, ForgetfulDecoder(reference), [hidden()], names=DECODER)
    assert [stage for _, stage in root_causes(report)] == ["forward"]


class ReferenceWindow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        return torch.cumsum(self.linear(x), 1)


class CandidateWindow(nnx.Module):
    """Writes to a cache at an int32 index, beside Python ints, and to a table of numpy."""

    def __init__(self, reference):
        self.linear = linear(reference.linear)
        self.linear.kernel = nnx.Param(np.asarray(self.linear.kernel[...]))
        self.index = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        y = self.linear(x)
        cache = jnp.zeros_like(y)
        for n in range(y.shape[1]):
            part = y[:, n : n + 1]
            cache = jax.lax.dynamic_update_slice(cache, part, (0, self.index[...], 0))
            self.index.set_value(self.index[...] + 1)
        return jnp.cumsum(cache, 1) + 0 * self.linear.kernel[...].at[0].add(1).sum()


@pytest.mark.parametrize("names", [None, {"linear": "linear"}])
def test_x64_breaks_no_cache_no_numpy_leaves_and_no_at(names):
    reference = randomize(ReferenceWindow())
    given = {} if names is None else {"names": names}
    report = compare(reference, CandidateWindow(reference), [hidden()], **given)
    assert report.verdict == "rounding", str(report)


class ReferenceTransposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return x + self.last(torch.tanh(self.mix(torch.relu(self.first(x)))))


class Turned(nnx.Module):
    """A Linear on features by tokens by examples."""

    def __init__(self, reference):
        self.linear = linear(reference)

    def __call__(self, x):
        return self.linear(x.T).T


class CandidateTransposed(nnx.Module):
    def __init__(self, reference):
        self.first = linear(reference.first)
        self.mix = Turned(reference.mix)
        self.last = linear(reference.last)

    def __call__(self, x):
        return x + self.last(jnp.tanh(self.mix(jax.nn.relu(self.first(x)).T)).T)


class Halved(CandidateTransposed):
    """Gives its part two arrays, of which the reference has one."""

    class Part(nnx.Module):
        def __init__(self, reference):
            self.linear = linear(reference)

        def __call__(self, left, right):
            return self.linear(jnp.concatenate([left, right], -1))

    def __init__(self, reference):
        super().__init__(reference)
        self.mix = Halved.Part(reference.mix)

    def __call__(self, x):
        left, right = jnp.split(jax.nn.relu(self.first(x)), 2, -1)
        return x + self.last(jnp.tanh(self.mix(left, right)))


@pytest.mark.parametrize("candidate", [CandidateTransposed, Halved])
def test_unaligned_parts_do_not_accuse_their_healthy_parent(candidate):
    reference = randomize(ReferenceTransposed())
    names = {name: name for name in ("first", "mix", "last")}
    report = compare(reference, candidate(reference), [hidden()], names=names)
    assert report.verdict == "rounding", str(report)


class Rounded(CandidateMlp):
    def __call__(self, x):
        return super().__call__(x) * (1 + 1e-6)


def test_the_most_severe_root_cause_comes_first():
    reference = randomize(ReferenceMlp())
    candidate = CandidateMlp(reference)
    candidate.__class__ = Rounded
    candidate.ln.epsilon = 0.1
    report = compare(reference, candidate, [hidden()], names=NAMES)
    assert root_causes(report) == [("ln", "forward"), ("", "forward")]
    assert str(report).splitlines()[-1].startswith("bug: ln (reference: norm)")


class ReferencePast(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys = nn.Linear(D, D)

    def forward(self, x, past=None):
        keys = self.keys(x)
        if past is not None:
            keys = torch.cat([past[0], keys], 1)
        return torch.cumsum(torch.tanh(keys), 1)


class CandidatePast(nnx.Module):
    """Takes old keys as an argument; its own cache is for decoding."""

    def __init__(self, reference):
        self.keys = linear(reference.keys)
        self.cache = nnx.Cache(jnp.zeros((2, 7, D)))

    def __call__(self, x, *, past=None, decode=False, rngs=None):
        keys = self.keys(x)
        if decode:
            self.cache.set_value(jax.lax.dynamic_update_slice(self.cache[...], keys, (0, 4, 0)))
            keys = self.cache[...]
        elif past is not None:
            keys = jnp.concatenate([past["keys"], keys], 1)
        return jnp.cumsum(jnp.tanh(keys), 1)


@pytest.mark.parametrize("as_given", [np.asarray, torch.from_numpy])
def test_caches_are_inputs_in_arguments_and_in_modules(as_given):
    reference = randomize(ReferencePast())
    candidate = CandidatePast(reference)
    x, past = hidden()[:, :3], hidden(1)[:, :4]
    inputs = {"x": x, "past": [as_given(past)]}
    own = {"x": x, "past": {"keys": as_given(past)}, "rngs": nnx.Rngs(0)}
    candidate.cache.set_value(candidate.cache[...].at[:, :4].set(past))
    for jax_inputs in (own, {"x": x, "decode": True}):
        report = compare(reference, candidate, inputs, jax_inputs=jax_inputs)
        assert report.verdict == "rounding", report
        assert report.coverage.parameters == (2, 2)
