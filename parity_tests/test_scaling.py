"""With 1/sqrt(head size) a softmax stays soft at any head size, without it it saturates."""

import numpy as np

import torch_ref.scaling
from jaxformer import scaling


def test_without_scaling_the_softmax_saturates_and_with_it_it_does_not():
    candidate = scaling.softmax_scaling(num_queries=128, num_keys=48)
    reference = torch_ref.scaling.softmax_scaling(num_queries=128, num_keys=48)
    for which in ("scaled", "unscaled"):
        assert candidate[which].keys() == reference[which].keys()
        for name, values in candidate[which].items():
            np.testing.assert_allclose(values, reference[which][name], rtol=1e-12, atol=0)
    scaled, unscaled = candidate["scaled"], candidate["unscaled"]
    sizes = np.array([16, 64, 256, 1024])
    np.testing.assert_allclose(scaled["score_variance"], 1, atol=0.12)
    np.testing.assert_allclose(unscaled["score_variance"] / sizes, 1, atol=0.12)
    # Scores of variance 1 lose about half a nat to an even choice, at any head size.
    np.testing.assert_allclose(scaled["entropy"], np.log(48) - 0.5, atol=0.1)
    assert np.ptp(scaled["gradient"]) < 0.03
    assert scaled["gradient"].min() > 1.85
    assert (np.diff(unscaled["entropy"]) < 0).all()
    assert (np.diff(unscaled["max_weight"]) > 0).all()
    assert (np.diff(unscaled["gradient"]) < 0).all()
    assert unscaled["entropy"][-1] < 0.2
    assert unscaled["max_weight"][-1] > 0.9
    assert unscaled["gradient"][-1] < scaled["gradient"][-1] / 8


def test_the_size_of_the_softmax_gradient_has_its_closed_form():
    result = scaling.softmax_scaling([16], num_queries=32, num_keys=9, seed=4)["unscaled"]
    random = np.random.default_rng((4, 16))
    q, k = (random.standard_normal((n, 16)) for n in (32, 9))
    weights = np.exp(q @ k.T)
    weights /= weights.sum(axis=1, keepdims=True)
    expected = np.mean(2 * (1 - np.square(weights).sum(axis=1)))
    np.testing.assert_allclose(result["gradient"], [expected], rtol=1e-12)
