"""Every case of ``cases.py`` against every proof."""

import pytest

from parity_tests.cases import CASES
from parity_tests.harness import DTYPES, Pair
from parity_tests.table import float64_figures, rounding_figures, save_figures
from parity_tests.verdict import judge_float64
from tests.support.tiers import SLOW, first_of_each, full_except

# The default tier proves outputs and gradients of every part and of some whole models, at usual
# lengths, and all else of the first case of each component, of large ones less. The full one proves
# outputs and gradients of every case, and much else of those of the default tier.
MADE_OF_MODELS = ("dual_encoder", "speech_transformer", "encoder_decoder_classifier")
MODELS = (
    "transformer_lm",
    "encoder_decoder",
    "transformer_classifier",
    "vision_transformer",
    *MADE_OF_MODELS,
)
SOME_MODELS = (
    "gpt2",
    "llama",
    "model",
    "first",
    "tokens",
    "vit",
)
# Parts that are large enough for a compiler to take its time.
LARGE_PARTS = (
    "blocks",
    "pooling",
    "latent_attention",
    "disentangled",
    "experts",
    "speech_classifier",
)
SOME_VARIANTS = ("multi-head", "grouped-query", "additive-bias", "soft-cap", "query-key-norm")
SOME_EXPERTS = ("mixture", "mixture-sigmoid-groups", "linear")
# Whose rounding stands for that of other mixtures, and of other models in bfloat16.
ROUNDED_EXPERTS = ("mixture", "mixture-shared-gate")
ROUNDED_MODELS = ("transformer_lm",)
FIRST = {case.component: case for case in reversed(CASES)}
FIRST_DROPOUT = {case.component: case for case in reversed(CASES) if case.dropout}.values()


def is_quick(case):
    name = case.name.partition("/")[2]
    if case.component in MADE_OF_MODELS:
        # The proofs of their model types run in the default tier.
        return False
    if case.component in MODELS:
        return name in SOME_MODELS
    if case.component == "experts":
        return name in SOME_EXPERTS
    variant = case.component in ("blocks", "attention") and "-" in name
    return not name.startswith("far-") and (not variant or name in SOME_VARIANTS)


def is_quick_rounding(case, dtype):
    if case.component in (*MODELS, *LARGE_PARTS):
        # One model stands for all that are made of these.
        return case is FIRST["transformer_lm"] and dtype == "float32"
    return case is FIRST[case.component]


def is_rarely_rounded(case, dtype):
    """Whether others stand for it: its parts for a model, some variants and the first elsewhere.

    Compiling with all optimisations takes most of the time of these tests.
    """
    if case.component in MADE_OF_MODELS:
        return True
    is_first = case is FIRST[case.component]
    is_other_model = case.component in MODELS and case.component not in ROUNDED_MODELS
    if dtype != "float32" and (is_other_model or not is_first or case.component in LARGE_PARTS):
        return True
    if case.component == "experts":
        return not is_first and case.name.partition("/")[2] not in ROUNDED_EXPERTS
    return not is_quick(case) and not is_first


PARTS_AND_SOME_MODELS = full_except(CASES, is_quick)
# Operators run one by one are those that are compiled: two cases of a component stand for the rest.
EAGER = first_of_each(
    full_except(CASES, is_quick, SLOW), lambda case: case.component, others=SLOW, count=2
)
ROUNDING = full_except(
    full_except(
        [(case, dtype) for case in CASES for dtype in DTYPES],
        lambda *given: not is_rarely_rounded(*given),
        SLOW,
    ),
    is_quick_rounding,
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pair(request):
    return Pair(request.param)


@pytest.mark.parametrize("pair", PARTS_AND_SOME_MODELS, indirect=True, ids=lambda case: case.name)
def test_float64_output_and_gradients_agree(pair):
    for std in pair.case.stds():
        save_figures(pair.case, float64_figures(pair, std))


@pytest.mark.parametrize("pair", EAGER, indirect=True, ids=lambda case: case.name)
@pytest.mark.tier("full")
def test_float64_eager_agrees_with_jitted_and_weights_with_torch(pair):
    for std in pair.case.stds():
        eager = pair.jax_eagerly(std)
        judge_float64(eager, pair.torch(std, return_weights=True))
        judge_float64({"output": eager["output"]}, {"output": pair.jax(std)["output"]})


# float64 shows that the two sides compute the same. What the optimiser does to it, by fusing and
# by reordering, shows in narrower dtypes.
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("pair", "dtype"),
    ROUNDING,
    indirect=["pair"],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_is_left_is_rounding(pair, dtype):
    for std in pair.case.stds():
        figures = rounding_figures(pair, std, DTYPES[dtype])
        if dtype == "float32":
            save_figures(pair.case, figures)


@pytest.mark.parametrize(
    "case",
    full_except(
        full_except(
            [case for case in CASES if case.dropout],
            lambda case: case in FIRST_DROPOUT or case.component not in MODELS,
            SLOW,
        ),
        lambda case: case in FIRST_DROPOUT and case.component not in MODELS,
    ),
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
