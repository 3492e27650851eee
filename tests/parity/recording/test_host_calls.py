"""A call on the host within what is traced is made with arrays, in the order of the trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.parity.recording.operators.evaluation import evaluate_in_jax, evaluate_in_numpy
from jaxformer.parity.recording.operators.host_calls import call_on_host

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize("evaluate", [evaluate_in_numpy, evaluate_in_jax])
def test_it_is_made_when_what_it_is_given_is_known(evaluate):
    seen = []

    def double(name, x, factors):
        seen.append((name, np.array(x), factors["mask"]))
        return np.asarray(x) * factors["by"]

    def model(x):
        for name in ("first", "second"):
            given = {"by": x[0, 1] + 1, "mask": None}
            x = call_on_host(lambda *a, name=name: double(name, *a), x, x + 1, given)
        return jnp.sum(x)

    traced = jax.make_jaxpr(model)(X)
    assert seen == []
    (found,) = evaluate(traced, [X])
    first = (X + 1) * 2
    np.testing.assert_allclose(found, ((first + 1) * (first[0, 1] + 1)).sum())
    assert [(name, mask) for name, _, mask in seen] == [("first", None), ("second", None)]
    np.testing.assert_array_equal(seen[1][1], first + 1)


def test_an_error_in_it_is_raised_as_it_is():
    def fail(x):
        raise OSError("the disk is gone")

    traced = jax.make_jaxpr(lambda x: call_on_host(fail, x, x))(X)
    with pytest.raises(OSError, match="the disk is gone"):
        evaluate_in_numpy(traced, [X])
