"""jaxformer's own models, and parts of them, beside references that are special in some way."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import torch_ref.feed_forward
from jaxformer.errors import UsageError
from jaxformer.feed_forward import FeedForward
from jaxformer.parity.comparison.api import assert_parity, compare
from jaxformer.parity.comparison.generation import compare_generation
from jaxformer.parity.comparison.modules import compare_with
from jaxformer.parity.comparison.training import compare_training
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.repro import write_repro
from jaxformer.parity.repro.calls import record_reference
from jaxformer.porting import from_torch
from parity_tests.families import encdec, nanogpt
from tests.support import mutants
from tests.support.subjects import causal, hidden, padded, randomize, root_causes, subject
from torch_ref.config import TransformerLMConfig
from torch_ref.transformer_lm import TransformerLM

pytestmark = pytest.mark.usefixtures("float64")

D, F = 24, 40


class ReferenceGPT(nanogpt.GPT):
    """A GPT that is called as nanoGPT's own is: without targets it gives the last logits alone."""

    def __init__(self, config):
        super().__init__(config)
        self.config = config

    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.view(-1))

    def generate(self, idx, max_new_tokens):
        raise NotImplementedError


@pytest.mark.tier("full")
def test_the_class_of_nanogpt_is_called_so_that_it_gives_all_logits():
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 6, "block_size": 16, "vocab_size": 11}
    gpt = ReferenceGPT(nanogpt.GPTConfig(**settings, bias=False)).eval()
    tokens = torch.arange(9)[None]
    assert gpt(tokens)[0].shape == (1, 1, 11)
    assert compare(gpt, from_torch(gpt), [tokens]).verdict == "rounding"
    assert compare_training(gpt, steps=2).verdict in ("exact", "rounding")
    assert compare_generation(gpt, tokens=3).verdict in ("exact", "rounding")


@pytest.mark.tier("full")
def test_attention_to_another_sequence():
    x, memory = hidden(1), hidden(2, 13)
    reference = randomize(encdec.MultiHeadAttention(D, 4))
    given = [x, memory, memory, padded()]
    report = assert_parity(reference, None, given, dialect="encdec")
    # Keys and values are one input tensor or two: only the sum of the gradients is known.
    assert {"input 0", "input 1"} <= set(report.nodes[0].backward)
    assert report.nodes[0].maps is not None

    layer = randomize(encdec.DecoderLayer(D, 4, F))
    given = [x, memory, causal()[None, None], padded()]
    report = assert_parity(layer, None, given, dialect="encdec")
    assert "cross_attention" in {node.path for node in report}


@pytest.mark.tier("full")
def test_a_mask_that_the_model_makes_wrongly_is_the_models_bug():
    found = subject("encdec")
    wrong = [*found.jax_inputs[:2], padded() & (np.arange(13) > 0), found.jax_inputs[3]]
    report = compare_with(found.reference, found.candidate, wrong, dtype="float64")
    assert root_causes(report) == [("encoder", "forward")]
    assert "the mask of blocks.0.attention" not in report.root_causes[0].message
    assert "the mask of blocks.0 differs" in report.root_causes[0].message


def test_a_reference_whose_layers_differ_is_compared_though_it_cannot_be_ported():
    found = subject("gpt2")
    reference = copy.deepcopy(found.torch_module)
    reference.transformer.h[1].ln_1.eps = 1e-3
    report = compare(reference, found.fresh(), found.inputs, dtype="float64")
    assert root_causes(report) == [("blocks.1.attention_norm", "forward")]


def test_a_gradient_that_stops_in_the_reference_is_a_bug_of_the_gradient():
    found = subject("unified learned")
    reference = copy.deepcopy(found.torch_module)
    reference.layers[1].ffn.net[0].register_forward_hook(lambda module, given, out: out.detach())
    report = compare(
        reference, found.fresh(), found.inputs, jax_inputs=found.jax_inputs, dialect="unified",
        dtype="float64",
    )  # fmt: skip
    assert root_causes(report) == [("blocks.1.feed_forward.up_proj", "backward")]


def test_without_gradients():
    found = subject("llama")
    report = compare(found.torch_module, None, found.inputs, backward=False, dtype="float64")
    assert report.mode == "forward"
    assert report.verdict == "rounding"
    assert not any(node.backward for node in report)


def test_inputs_of_jaxformers_own_models_may_have_names():
    found = subject("gpt2")
    reference, (tokens,) = found.torch_module, found.inputs
    with jax.enable_x64(False):
        assert compare(reference, None, {"input_ids": tokens}, backward=False).verdict == "rounding"
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        both = {"input_ids": tokens, "position_ids": positions}
        with pytest.raises(UsageError, match="give jax_inputs"):
            compare(reference, None, both)
        own = {"tokens": tokens, "positions": positions}
        report = compare(reference, None, both, jax_inputs=own, backward=False)
    assert report.verdict == "rounding"


def test_inputs_that_the_reference_does_not_take():
    reference = subject("gpt2").torch_module
    with jax.enable_x64(False):
        with pytest.raises(UsageError, match=r"fit the reference: .*; given: float32 \(2, 3\)"):
            compare(reference, None, np.zeros((2, 3), np.float32))
        with pytest.raises(
            UsageError, match=r"the reference: IndexError: .*; given: int64 \(1, 3\)"
        ):
            compare(reference, None, torch.full((1, 3), 10**6))
        with pytest.raises(UsageError, match=r"inputs must be an array, .*: got 'hello'"):
            compare(reference, None, "hello")


def small(**settings):
    """A model of torch_ref and its port."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "d_model": 8, "num_heads": 2, "num_layers": 2, "context_length": 9}
    reference = randomize(TransformerLM(TransformerLMConfig(**sizes, **settings)))
    return reference, from_torch(reference)


def test_a_reference_that_writes_in_place_is_compared_as_it_was(monkeypatch, tmp_path):
    """What enters the activation, and leaves the layer before it, is overwritten."""
    monkeypatch.setitem(torch_ref.feed_forward.ACTIVATIONS, "relu", torch.relu_)
    reference, candidate = small(activation="relu")
    tokens = np.arange(9)[None]
    assert compare(reference, candidate, [tokens]).verdict in ("exact", "rounding")
    layer = candidate.blocks[1].feed_forward.up_proj
    layer.bias[...] = layer.bias[...].at[2].add(-0.1)
    report = compare(reference, candidate, [tokens])
    assert root_causes(report) == [("blocks.1.feed_forward.up_proj", "parameters")]
    written = write_repro(
        tmp_path / "repro", reference, candidate, [tokens], "blocks.1.feed_forward.up_proj"
    )
    found = written.run(written.build_reference(), written.build_candidate())
    assert found.differences["output"].error == pytest.approx(0.1, rel=1e-4)
    # Where a block writes into what it is given, its first call is kept as it was.
    inner = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    calls = record_reference(nn.Sequential(inner), ["0"], lambda: inner(x))
    assert (calls["0"].args[0] < 0).any()
    assert not (x < 0).any()


def stopping(original, self, *args):
    return jax.lax.stop_gradient(original(*args))


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_model_that_lets_no_gradient_through(is_inside):
    reference, candidate = small()
    options = {}
    if is_inside:
        mutants.replace_methods(candidate, __call__=stopping)
    else:
        options["jax_call"] = lambda model, given: jax.lax.stop_gradient(model(*given))
    report = compare(reference, candidate, [np.arange(9)[None]], **options)
    assert root_causes(report) == [("", "backward")]
    count = len(nnx.to_flat_state(nnx.state(candidate, nnx.Param)))
    assert report.coverage.gradients == (0, count)


@pytest.mark.parametrize("path", ["blocks.1.attention_norm", "blocks.1"])
def test_a_module_that_returns_what_it_was_given(path):
    """It has the bug, whatever is around it; where both sides do so, it is none."""
    tokens = [np.arange(9)[None]]

    def unchanged(original, self, x, *args, **kwargs):
        return x

    reference, candidate = small()
    module = jax_modules.resolve(candidate, path)[0]
    mutants.replace_methods(module, __call__=unchanged)
    (cause,) = compare(reference, candidate, tokens).root_causes
    assert (cause.path, cause.stage) == (path, "forward")
    own = reference.get_submodule(path)
    own.forward = lambda x, *args, **kwargs: x
    assert compare(reference, candidate, tokens).verdict in ("exact", "rounding")
    (cause,) = compare(reference, from_torch(small()[0]), tokens).root_causes
    assert (cause.path, cause.stage) == (path, "forward")


def test_a_candidate_that_gives_another_part_of_the_result():
    reference, candidate = small()
    tokens = [np.arange(9)[None]]
    report = compare(reference, candidate, tokens, jax_call=lambda model, x: model(*x)[:, :-1])
    assert report.verdict == "incomplete"
    assert report.incomplete == ("the result has shape (1, 8, 11), the reference's (1, 9, 11)",)
    mutants.replace_methods(candidate, __call__=lambda original, self, x: original(x)[:, :-1])
    with pytest.raises(UsageError, match=r"the outputs cannot be aligned: .*; torch_call= and"):
        compare(reference, candidate, tokens)


class TanhMlp(nn.Module):
    """A feed-forward as no code base has it: its second layer goes by a name of its own."""

    def __init__(self):
        super().__init__()
        self.into, self.out_of = nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, x):
        return self.out_of(torch.nn.functional.gelu(self.into(x), approximate="tanh"))


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
def test_a_part_of_jaxformer_beside_a_reference_that_no_dialect_knows(activation):
    torch.manual_seed(0)
    reference = TanhMlp()
    candidate = FeedForward(D, F, activation=activation, rngs=nnx.Rngs(0))
    for layer, other in (
        (candidate.up_proj, reference.into),
        (candidate.down_proj, reference.out_of),
    ):
        layer.kernel.set_value(jnp.asarray(other.weight.detach().numpy().T))
        layer.bias.set_value(jnp.asarray(other.bias.detach().numpy()))
    given = np.random.default_rng(0).normal(size=(2, 5, D)).astype(np.float32)
    report = compare(reference, candidate, given)
    if activation == "gelu_tanh":
        assert report.verdict == "rounding"
    else:
        (cause,) = report.root_causes
        assert "erf" in cause.diagnosis
    assert compare(reference, candidate, given, dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(UsageError, match="no dialect has these arrays"):
        compare(reference, None, given)
