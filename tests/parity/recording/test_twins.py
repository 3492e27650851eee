"""Embeddings of one array are compared as the one that a candidate has."""

import numpy as np
import pytest
import torch
import transformers

from jaxformer.parity import compare
from jaxformer.parity.recording.twins import join_twins

pytestmark = pytest.mark.usefixtures("settings_of_jax")

ALIASES = {"encoder.table.weight": "shared.weight", "decoder.table.weight": "shared.weight"}


class Stack(torch.nn.Module):
    """Looks up tokens in a table of its own."""

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class TwoStacks(torch.nn.Module):
    """Calls the tables of both stacks, and not the one whose array they have."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.shared = torch.nn.Embedding(7, 5)
        self.encoder = Stack(torch.nn.Embedding(7, 5, **settings))
        self.decoder = Stack(torch.nn.Embedding(7, 5))
        self.encoder.table.weight = self.decoder.table.weight = self.shared.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.encoder(ids) - 2 * self.decoder(ids + 1)


def test_two_embeddings_of_one_array_become_one():
    module = TwoStacks()
    joined = join_twins(module, ALIASES)
    assert joined.encoder.table is joined.decoder.table is joined.shared
    assert joined.shared.weight is module.shared.weight
    assert module.encoder.table is not module.shared, "the module itself is not changed"
    ids = torch.tensor([[1, 3, 5]])
    assert (joined(ids) == module(ids)).all()


def test_embeddings_that_differ_stay_two():
    hooked, own = TwoStacks(), TwoStacks()
    hooked.encoder.table.register_forward_hook(lambda module, args, output: 2 * output)
    own.encoder.table.weight = torch.nn.Parameter(own.shared.weight.clone())
    for module in (TwoStacks(padding_idx=2), hooked, own):
        joined = join_twins(module, ALIASES)
        assert joined.encoder.table is not joined.shared
        assert joined.decoder.table is joined.shared
    module = TwoStacks()
    assert join_twins(module, {}) is module


@pytest.mark.tier("full")
def test_the_embedding_of_an_encoder_and_decoder_is_compared():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32, d_model=12, d_kv=3, d_ff=20, num_layers=1, num_heads=4
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    random = np.random.default_rng(0)
    source, target = random.integers(1, 32, (2, 7)), random.integers(1, 32, (2, 5))
    report = compare(model, None, [source, None, target], jax_inputs=[source, target])
    nodes = {node.path: node for node in report.nodes}
    assert report.verdict == "rounding"
    assert nodes["target_embedding"].verdict == "exact"
    assert nodes["encoder.position"].message == (
        "compared together with the module around it: the candidate does not call it"
    )
