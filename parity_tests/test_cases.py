"""Every case of ``cases.py`` against every proof."""

import pytest

from parity_tests.cases import CASES
from parity_tests.harness import DTYPES, Pair
from parity_tests.table import float64_figures, rounding_figures, save_figures
from parity_tests.verdict import judge_float64
from tests.support.tiers import first_of_each, full_except

pytestmark = pytest.mark.optimized


# The default tier proves outputs and gradients of every part, at usual lengths, and of some whole
# models, and all else of the first case of each component.
SOME_CASES = first_of_each(CASES, lambda case: case.component)
SOME_MODELS = ("gpt2", "llama", "model")
PARTS_AND_SOME_MODELS = full_except(
    CASES,
    lambda case: (
        (case.component not in ("transformer_lm", "encoder_decoder") and "/far-" not in case.name)
        or case.name.partition("/")[2] in SOME_MODELS
    ),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pair(request):
    return Pair(request.param)


@pytest.mark.parametrize("pair", PARTS_AND_SOME_MODELS, indirect=True, ids=lambda case: case.name)
def test_float64_output_and_gradients_agree(pair):
    for std in pair.case.stds():
        save_figures(pair.case, float64_figures(pair, std))


@pytest.mark.parametrize("pair", SOME_CASES, indirect=True, ids=lambda case: case.name)
@pytest.mark.tier("full")
def test_float64_eager_agrees_with_jitted_and_weights_with_torch(pair):
    for std in pair.case.stds():
        eager = pair.jax_eagerly(std)
        judge_float64(eager, pair.torch(std, return_weights=True))
        judge_float64({"output": eager["output"]}, {"output": pair.jax(std)["output"]})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", SOME_CASES, indirect=True, ids=lambda case: case.name)
def test_what_is_left_is_rounding(pair, dtype):
    for std in pair.case.stds():
        figures = rounding_figures(pair, std, DTYPES[dtype])
        if dtype == "float32":
            save_figures(pair.case, figures)


@pytest.mark.parametrize(
    "case",
    first_of_each([c for c in CASES if c.dropout], lambda case: case.component),
    ids=lambda case: case.name,
)
def test_float64_agrees_with_dropout_on(case):
    pair = Pair(case, training=True)
    assert pair.masks
    for path, keep in pair.masks.items():
        assert 0 < keep.mean() < 1, path
    candidate, reference = pair.jax(1.0), pair.torch(1.0)
    judge_float64(candidate, reference)
    if case.weights:
        judge_float64(pair.jax_eagerly(1.0), pair.torch(1.0, return_weights=True))


@pytest.mark.parametrize("pair", PARTS_AND_SOME_MODELS, indirect=True, ids=lambda case: case.name)
def test_every_case_with_dropout_says_so(pair):
    from jaxformer.layers import dropout_modules

    places = dropout_modules(pair.module) if pair.is_module else {}
    assert any(place.rate > 0 for place in places.values()) == pair.case.dropout
