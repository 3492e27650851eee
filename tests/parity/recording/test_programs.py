"""Programs of isolated modules: shared by equal ones, each with its own numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer.layers import Linear
from jaxformer.parity.recording.calls.jax_isolated import ForcedOutput, IsolatedModule
from jaxformer.parity.recording.calls.jax_programs import Programs
from jaxformer.parity.recording.calls.jax_trace import JaxCall, in_dtype

pytestmark = pytest.mark.usefixtures("float64")


class Scaled(nnx.Module):
    """A linear layer between two factors, a kept table, and rows that are chosen."""

    def __init__(self, seed, factor=2.0):
        self.linear = Linear(3, 4, rngs=nnx.Rngs(seed))
        self.gain = nnx.Param(jnp.full(3, 1.0 + seed))
        self.table = nnx.Variable(jnp.full(4, 10.0 * seed))
        self.factor = factor

    def __call__(self, x, rows):
        return self.linear(x * self.gain[...][None])[rows] * self.factor + self.table[...][None]


class Runs:
    """Isolated runs of modules that share programs."""

    def __init__(self):
        self.programs = Programs()

    @property
    def count(self):
        return sum(map(len, self.programs._known.values()))

    def __call__(self, module, x, rows=(1, 0), forced=None, share=True):
        call = JaxCall((np.asarray(x), np.asarray(rows)), {}, 0)
        forced = {} if forced is None else {"linear": [ForcedOutput(forced, [forced])]}
        programs = self.programs if share else None
        function = IsolatedModule(
            in_dtype(module, "float64"), "__call__", call, forced, programs=programs
        )
        cotangents = [np.ones((len(rows), 4))]
        return function.run(cotangents, {"linear": [[np.full(np.shape(x), 3.0)]]})


def assert_same(found, wanted):
    for field in dataclasses.fields(found):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        assert jax.tree.structure(one) == jax.tree.structure(other), field.name
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("is_forced", [False, True])
def test_equal_modules_share_a_program_and_keep_their_numbers(is_forced):
    run, random = Runs(), np.random.default_rng(0)
    for seed in range(3):
        given = random.normal(size=(2, 3)), (1, 0), random.normal(size=(2, 4))
        given = given if is_forced else given[:2]
        found = run(Scaled(seed), *given)
        assert_same(found, run(Scaled(seed), *given, share=False))
        expected = Scaled(seed)
        y = given[2] if is_forced else np.asarray(expected.linear(given[0] * (1.0 + seed)))
        np.testing.assert_allclose(found.outputs[0], y[[1, 0]] * 2 + 10.0 * seed, rtol=1e-12)
    assert run.count == 1


@pytest.mark.parametrize(
    "changed", [{"rows": (0, 1)}, {"rows": (0, 1, 1)}, {"x": np.ones((4, 3))}, {"factor": 3.0}]
)
def test_what_is_written_into_a_program_has_one_of_its_own(changed):
    run = Runs()
    given = {"x": np.ones((2, 3)), "rows": (1, 0), "factor": 2.0}
    for one in (given, given | changed):
        x, rows, factor = one.values()
        wanted = run(Scaled(1, factor), x, rows, share=False)
        assert_same(run(Scaled(1, factor), x, rows), wanted)
    assert run.count == 2


def test_a_run_without_gradients_has_a_program_of_its_own():
    run = Runs()
    module = in_dtype(Scaled(1), "float64")
    call = JaxCall((np.ones((2, 3)), np.array([1, 0])), {}, 0)
    forward = IsolatedModule(module, "__call__", call, {}, programs=run.programs).run()
    backward = run(Scaled(1), np.ones((2, 3)))
    assert run.count == 2
    assert not forward.parameter_gradients
    assert set(backward.parameter_gradients) == {"gain", "linear.kernel", "linear.bias"}
    np.testing.assert_array_equal(forward.outputs[0], backward.outputs[0])
