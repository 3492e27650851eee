"""With products that are custom calls: nothing but rounding, and no more than torch makes."""

import pytest

from jaxformer.execution import called_products
from parity_tests.cases import CASES
from parity_tests.harness import DTYPES, Pair
from parity_tests.table import rounding_figures
from tests.execution.test_called_products import for_each_library
from tests.support.tiers import full_except

NAMES = (
    "layers/linear",
    "attention/core-masked", "attention/multi-head", "attention/grouped-query",
    "attention/additive-bias", "attention/soft-cap", "attention/sinks", "attention/cross",
    "latent_attention/queries",
    "feed_forward/gated-silu",
    "transformer_lm/gpt2", "transformer_lm/llama", "transformer_lm/mistral",
    "experts/linear", "experts/mixture", "transformer_lm/experts",
    "transformer_lm/lora", "encoder_decoder/model-t5",
)  # fmt: skip
EXPECTED = {
    "layers": called_products.PRODUCT,
    "feed_forward": called_products.PRODUCT,
    "experts": called_products.GROUPED,
}
QUICK = ("layers/linear", "attention/multi-head", "attention/grouped-query", "experts/mixture")
CHOSEN = [case for case in CASES if case.name in NAMES]


@for_each_library
@pytest.mark.optimized
@pytest.mark.parametrize(
    "case", full_except(CHOSEN, lambda case: case.name in QUICK), ids=lambda case: case.name
)
def test_what_is_left_is_rounding(case, library, monkeypatch):
    assert len(CHOSEN) == len(NAMES)
    called, call = [], called_products._call

    def count(library, form, *arguments):
        called.append(form)
        return call(library, form, *arguments)

    monkeypatch.setattr(called_products, "_call", count)
    monkeypatch.setattr(called_products, "FEWEST_ROWS", 1)
    pair = Pair(case)
    for std in case.stds():
        with called_products.products_of(library):
            rounding_figures(pair, std, DTYPES["float32"])
    expected = EXPECTED.get(case.component, called_products.SCORES)
    assert expected in called, "these are XLA's products"
