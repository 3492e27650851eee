"""With the products of torch's library: nothing but rounding, and no more than torch makes."""

import pytest

from jaxformer.execution import torch_products
from parity_tests.cases import CASES
from parity_tests.harness import DTYPES, Pair
from parity_tests.table import rounding_figures
from tests.hardware.test_torch_library import needs_products
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
    "layers": torch_products.PRODUCT,
    "feed_forward": torch_products.PRODUCT,
    "experts": torch_products.GROUPED,
}
QUICK = ("layers/linear", "attention/multi-head", "attention/grouped-query", "experts/mixture")
CHOSEN = [case for case in CASES if case.name in NAMES]


@needs_products
@pytest.mark.optimized
@pytest.mark.parametrize(
    "case", full_except(CHOSEN, lambda case: case.name in QUICK), ids=lambda case: case.name
)
def test_what_is_left_is_rounding(case, monkeypatch):
    assert len(CHOSEN) == len(NAMES)
    called, call = [], torch_products._call

    def count(target, *arguments):
        called.append(target)
        return call(target, *arguments)

    monkeypatch.setattr(torch_products, "_call", count)
    monkeypatch.setattr(torch_products, "FEWEST_ROWS", 1)
    pair = Pair(case)
    for std in case.stds():
        with torch_products.torch_products():
            rounding_figures(pair, std, DTYPES["float32"])
    expected = EXPECTED.get(case.component, torch_products.SCORES)
    assert expected in called, "these are XLA's products"
