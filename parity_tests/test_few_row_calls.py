"""With products of few rows by custom calls: nothing but rounding, and no more than torch makes."""

import pytest

from jaxformer.attention import MultiHeadAttention
from jaxformer.execution import few_rows
from jaxformer.experts import ExpertWeights
from jaxformer.hardware import row_products
from jaxformer.layers import Embedding, Linear
from parity_tests.cases import CASES
from parity_tests.harness import DTYPES, Pair, output_draws
from parity_tests.verdict import judge_rounding
from tests.hardware.test_custom_calls import needs_calls
from tests.support.tiers import full_after

HEADS = {row_products.PAIRS, row_products.PAIRS_BY_TRANSPOSED}
EXPECTED = {
    "layers/linear": {row_products.PRODUCT},
    "attention/grouped-query": {row_products.PRODUCT, *HEADS},
    "feed_forward/gated-silu": {row_products.PRODUCT},
    "transformer_lm/gpt2": {row_products.BY_TRANSPOSED, *HEADS},
    "transformer_lm/llama": {row_products.PRODUCT, *HEADS},
    "transformer_lm/lora": {row_products.PRODUCT, *HEADS},
    "transformer_lm/experts": {row_products.GROUPED, *HEADS},
    "experts/mixture": {row_products.GROUPED},
    "encoder_decoder/model-t5": {row_products.PRODUCT, *HEADS},
}
CHOSEN = [case for case in CASES if case.name in EXPECTED]
FLOAT32 = DTYPES["float32"]


@needs_calls
@pytest.mark.parametrize("case", full_after(4, CHOSEN), ids=lambda case: case.name)
def test_what_is_left_is_rounding(case, monkeypatch):
    assert len(CHOSEN) == len(EXPECTED)
    called, call = [], few_rows.call_for_floats

    def count(target, *arguments):
        called.append(target)
        return call(target, *arguments)

    monkeypatch.setattr(few_rows, "call_for_floats", count)
    monkeypatch.setattr(few_rows, "MOST_ROWS", 1000)
    for layer in (Embedding, ExpertWeights, Linear, MultiHeadAttention):
        monkeypatch.setattr(layer, "uses_custom_call", True)
    pair = Pair(case)
    for std in case.stds():
        judge_rounding(output_draws(pair, std, FLOAT32), FLOAT32)
    assert EXPECTED[case.name] <= set(called), "these are XLA's products"
