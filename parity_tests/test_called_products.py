"""With custom calls for what takes time in a step: no more rounding than torch makes."""

import pytest

from jaxformer.execution import (
    called_activations,
    called_attention,
    called_feed_forward,
    called_losses,
    called_norms,
    called_products,
)
from jaxformer.hardware import (
    activation_calls,
    attention_call,
    loss_calls,
    matrix_products,
    norm_calls,
)
from parity_tests.case_parts import SELF, TOKENS, K, attention, lm
from parity_tests.cases import CASES
from parity_tests.harness import DTYPES, Case, Pair
from parity_tests.table import rounding_figures
from tests.execution.test_called_products import for_each_library
from tests.support.tiers import full_except

NAMES = (
    "layers/linear",
    "attention/core-masked", "attention/multi-head", "attention/grouped-query",
    "attention/additive-bias", "attention/soft-cap", "attention/sinks", "attention/cross",
    "latent_attention/queries",
    "feed_forward/gated-silu", "feed_forward/gelu", "feed_forward/gelu_tanh",
    "norms/layer-norm", "norms/layer-norm-no-bias", "norms/layer-norm-unit-offset",
    "norms/layer-norm-plain", "norms/rms-norm", "norms/rms-norm-unit-offset",
    "transformer_lm/gpt2", "transformer_lm/llama", "transformer_lm/mistral",
    "experts/linear", "experts/mixture", "transformer_lm/experts",
    "transformer_lm/lora", "encoder_decoder/model-t5",
    "losses/cross-entropy", "losses/cross-entropy-masked", "losses/each-token",
)  # fmt: skip
EXPECTED = {
    "layers": called_products.PRODUCT,
    "norms": norm_calls.NORM_BACK,
    "feed_forward": called_products.PRODUCT,
    "experts": called_products.GROUPED,
    "wide_heads": attention_call.ATTENTION_BACK,
    "losses": loss_calls.LOSSES_BACK,
}
QUICK = (
    "layers/linear", "attention/multi-head", "attention/grouped-query", "experts/mixture",
    "feed_forward/gelu", "norms/layer-norm", "wide_heads/causal", "losses/each-token",
)  # fmt: skip
# Heads as wide as the call takes, whose weights nobody asks for.
WIDE_HEADS = [
    Case("wide_heads/attention", attention(head_dim=16, num_kv_heads=K), SELF),
    Case("wide_heads/causal", lm(head_dim=16, positions="rotary"), TOKENS),
    Case("wide_heads/window", lm(head_dim=16, num_kv_heads=K, sliding_window=5), TOKENS),
]
CHOSEN = [case for case in CASES if case.name in NAMES] + WIDE_HEADS


@for_each_library
@pytest.mark.optimized
@pytest.mark.parametrize(
    "case", full_except(CHOSEN, lambda case: case.name in QUICK), ids=lambda case: case.name
)
def test_what_is_left_is_rounding(case, library, monkeypatch):
    assert len(CHOSEN) == len(NAMES) + len(WIDE_HEADS)
    called = []

    def spy(module, place, name="_call"):
        call = getattr(module, name)

        def count(*arguments, **options):
            called.append(arguments[place])
            return call(*arguments, **options)

        monkeypatch.setattr(module, name, count)

    # Whose argument says which call it is.
    spy(called_products, 1)
    spy(called_norms, 0, "call_for_floats")
    spy(called_activations, 0, "call_for_floats")
    spy(called_feed_forward, 0, "call_for_floats")
    spy(called_attention, 0, "call_for_floats")
    spy(called_losses, 0, "call_for_floats")
    monkeypatch.setattr(called_attention, "count_cores", lambda: 1)
    monkeypatch.setattr(called_products, "FEWEST_ROWS", 1)
    monkeypatch.setattr(called_norms, "FEWEST_NUMBERS", 1)
    monkeypatch.setattr(called_activations, "FEWEST_NUMBERS", 1)
    monkeypatch.setattr(called_losses, "FEWEST_CLASSES", 1)
    pair = Pair(case)
    for std in case.stds():
        with called_products.products_of(library):
            rounding_figures(pair, std, DTYPES["float32"])
    expected = EXPECTED.get(case.component, called_products.SCORES)
    assert expected in called, "these are XLA's"
    if "gelu" in case.name:
        whole = matrix_products.target("jaxformer", matrix_products.GELU_AND_SLOPE)
        assert (whole if library == "jaxformer" else activation_calls.GELU_AND_SLOPE) in called
