"""The parity debugger names a wrong order of patches, and a wrong bucket of distances."""

import numpy as np
import pytest
import torch
from flax import nnx

from jaxformer.config import TransformerLMConfig
from jaxformer.config_vision import VisionTransformerConfig
from jaxformer.parameters import get_parameters
from jaxformer.parity import compare
from jaxformer.parity.sources.checkpoints import make_twin
from jaxformer.porting import export_arrays
from jaxformer.transformer_lm import TransformerLM
from jaxformer.vision_transformer import VisionTransformer
from tests.support.mutants import replace_methods
from tests.support.tiers import full_after

pytestmark = pytest.mark.usefixtures("float64")

VISION = VisionTransformerConfig(
    d_model=20, num_heads=4, head_dim=6, d_ff=34, num_layers=2, image_height=11, image_width=21,
    patch_height=3, patch_width=5, num_channels=2, context_length=13, num_labels=9,
)  # fmt: skip
BUCKETS = TransformerLMConfig(
    vocab_size=37, d_model=20, num_heads=4, head_dim=6, d_ff=34, num_layers=2, context_length=23,
    causal=False, positions="relative_buckets", num_position_buckets=6, max_bucket_distance=9,
    learned_rows=True, initialization="torch",
)  # fmt: skip
IMAGES = np.random.default_rng(0).standard_normal((3, 2, 11, 21))
IDS = np.random.default_rng(0).integers(0, 37, (3, 23))


def sides(model, config):
    """Both sides of a model, with the same weights."""
    candidate = model(config, rngs=nnx.Rngs(0))
    reference = make_twin(config).double()
    arrays = export_arrays({n: np.asarray(a) for n, a in get_parameters(candidate).items()})
    reference.load_state_dict({n: torch.as_tensor(a).double() for n, a in arrays.items()})
    return reference.eval(), candidate


def root_causes(report):
    assert report.verdict == "bug"
    return {node.path: node.message for node in report.root_causes}


def by_column(call, self, images):
    return call(images).reshape(3, 3, 4, -1).swapaxes(1, 2).reshape(3, 12, -1)


def channels_last(call, self, images):
    parts = images[:, :, :9, :20].reshape(3, 2, 3, 3, 4, 5).transpose(0, 2, 4, 3, 5, 1)
    return self.proj(parts.reshape(3, 12, -1))


@pytest.mark.parametrize("wrong", full_after(0, [channels_last, by_column]))
def test_a_wrong_order_of_patches_is_named(wrong):
    reference, candidate = sides(VisionTransformer, VISION)
    assert compare(reference, candidate, [IMAGES]).verdict == "rounding"
    replace_methods(candidate.patch_embedding, __call__=wrong)
    found = root_causes(compare(reference, candidate, [IMAGES]))
    assert list(found) == ["patch_embedding"]


@pytest.mark.tier("full")
def test_a_wrong_bucket_is_named():
    reference, candidate = sides(TransformerLM, BUCKETS)
    assert compare(reference, candidate, [IDS]).verdict == "rounding"
    replace_methods(candidate.position, bias=lambda call, self, q, distance: call(q, distance + 1))
    found = root_causes(compare(reference, candidate, [IDS]))
    assert list(found) == [""]
    expected = "the position_bias of blocks.0 differs, though the mask of blocks.0 is right"
    assert expected in found[""]
