"""What a candidate's modules return, marked in its jaxpr."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

from jaxformer.parity.recording.operators.candidates import as_candidate
from jaxformer.parity.recording.operators.jax_run import JaxRun
from jaxformer.parity.recording.operators.tape import Tape

D = 4
X = np.arange(3.0 * D).reshape(3, D) / 7


class Both(NamedTuple):
    first: jax.Array
    rest: tuple


class Half(nnx.Module):
    """Returns more than an array, and writes to a list that it is given."""

    def __init__(self, wrap):
        self.linear = nnx.Linear(D, D, rngs=nnx.Rngs(0))
        self.wrap = wrap

    def __call__(self, x, seen):
        seen.append(x)
        return Both(self.wrap(self.linear)(x), (checkpoint_name(x, "residual") + 1, None))


class Model(nnx.Module):
    def __init__(self, wrap=lambda call: call):
        self.halves = nnx.List([Half(wrap), Half(wrap)])

    def __call__(self, x):
        seen = []
        for half in self.halves:
            both = half(x, seen)
            x = both.first + both.rest[0]
        assert len(seen) == 2
        return x


def recorded(model):
    """Returns the marks of a run forward and backward, without their classes, and the run."""
    run = JaxRun(as_candidate(model), [X], {}, Tape(), {})
    run.backward({0: np.ones(run.tape.outputs[0].shape)})
    marks = {}
    for mark, value in run.marks:
        marks.setdefault(mark.path, []).append(value)
    return marks, run


@pytest.mark.parametrize("wrap", [lambda call: call, jax.jit, jax.checkpoint])
def test_modules_of_nnx(wrap):
    model = Model(wrap)
    marks, run = recorded(model)
    paths = {"", "halves.0", "halves.1", "halves.0.linear", "halves.1.linear"}
    assert set(marks) == paths
    entered = X
    for place in range(2):
        linear, path = model.halves[place].linear, f"halves.{place}.linear"
        (returned,) = marks[path]
        right = entered @ np.float64(linear.kernel[...]) + np.float64(linear.bias[...])
        np.testing.assert_allclose(returned.data, right, rtol=1e-12)
        first, second = marks[f"halves.{place}"]
        assert first is returned
        np.testing.assert_allclose(second.data, entered + 1)
        assert returned.producer.module == path
        entered = first.data + second.data
    assert marks[""] == run.tape.outputs
    # A mark is no operator; the user's own is one, as before.
    assert {op.name for op in run.tape.operators} >= {"dot_general", "add", "name"}
    assert sum(op.name == "name" for op in run.tape.operators) == 2


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnp.tanh(linen.Dense(D)(x)), linen.Dense(D, name="gate")(x)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        one, other = linen.remat(Block)(name="block")(x)
        return one * other


def test_modules_of_linen():
    module = LinenModel()
    variables = module.init(jax.random.key(0), X)
    marks, run = recorded((module, variables))
    assert set(marks) == {"", "block", "block.Dense_0", "block.gate"}
    assert len(marks["block"]) == 2
    assert marks["block"][1] is marks["block.gate"][0]
    assert marks[""] == run.tape.outputs


class Pair(tuple):
    """A tuple of a class of its own."""

    __slots__ = ()

    @property
    def second(self):
        return self[1]


class Same(nnx.Module):
    """Asks whether it is given one array twice, and whether a part returned what it was given."""

    def __init__(self):
        self.identity = Identity()

    def __call__(self, x):
        return self.attend(Pair((x, x)))

    def attend(self, both):
        assert both[0] is both.second
        kept = self.identity(both)
        assert kept is both
        one = self.identity(both[0])
        assert one is both[0]
        return 2 * one


class Identity(nnx.Module):
    def __call__(self, x):
        return x


def test_what_a_module_is_given_stays_the_same_object():
    marks, run = recorded(Same())
    assert set(marks) == {""}
    np.testing.assert_allclose(run.tape.outputs[0].data, 2 * X)


def test_functions_have_no_marks():
    marks, _ = recorded((lambda parameters, x: x @ parameters, np.eye(D)))
    assert not marks
