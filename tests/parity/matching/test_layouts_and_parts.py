"""Arrays are found in any layout, put together from parts, and are not taken for reordered ones."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare
from jaxformer.parity.matching.content import fingerprint, fingerprints_of_parts
from jaxformer.parity.matching.parts import assemble, find_pieces
from tests.support.ports.torch_models import perturbed

pytestmark = pytest.mark.usefixtures("settings_of_jax")


def test_fingerprints_do_not_see_the_layout():
    array = np.random.default_rng(0).normal(size=(3, 4, 5))
    assert fingerprint(array) == fingerprint(array.transpose(2, 0, 1).copy().reshape(5, 12))
    assert fingerprint(array) != fingerprint(array + 1e-3)
    assert fingerprint(np.zeros(3)) == fingerprint(-np.zeros(3))
    parts = dict(fingerprints_of_parts(array))
    assert parts[()] == fingerprint(array)
    assert parts[1,][2] == fingerprint(array[:, 2])
    assert parts[0, 2][1, 3] == fingerprint(array[1, :, 3])
    assert parts[0, 1, 2][2, 3, 4] == fingerprint(array[2, 3, 4])


@pytest.mark.parametrize("fuse", ["rows", "columns", "stack"])
def test_an_array_is_put_together_from_parts(fuse):
    random = np.random.default_rng(0)
    sources = {name: random.normal(size=(4, 6)) for name in "abc"}
    join = {
        "rows": lambda arrays: np.concatenate(arrays, 0),
        "columns": lambda arrays: np.concatenate([a.T for a in arrays], 1),
        "stack": lambda arrays: np.stack([a.T for a in arrays]),
    }[fuse]
    fused = join(list(sources.values()))
    pieces = find_pieces(fused, sources)
    others = {name: random.normal(size=(4, 6)) for name in "abc"}
    np.testing.assert_array_equal(
        assemble(fused.shape, pieces, others), join(list(others.values()))
    )
    assert find_pieces(fused + 1, sources) is None
    # Parts that stand twice could be either.
    assert find_pieces(fused, {**sources, "d": sources["a"]}) is None


@pytest.mark.parametrize("is_right", [True, False])
def test_parameters_in_another_order(is_right):
    """Hidden units, like heads, may stand in any order; if they do so on one side alone, not."""
    reference = perturbed(
        torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    )
    first, second = (reference[n].weight.detach().numpy().T for n in (0, 2))
    bias, last = (reference[n].bias.detach().numpy() for n in (0, 2))
    order = np.roll(np.arange(7)[::-1], 2)
    params = {"w": first[:, order], "b": bias, "v": second, "c": last}
    if is_right:
        params |= {"b": bias[order], "v": second[order]}

    def port(p, x):
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]

    x = np.random.default_rng(0).normal(size=(4, 5))
    report = compare(reference, (port, params), x)
    assert report.verdict == ("rounding" if is_right else "bug"), str(report)
    assert any("in the same order" in remark for remark in report.remarks)
    if not is_right:
        assert report.root_causes[0].torch_module == "0"
