"""The kinds of blocks that a model has: one block of each stands for all of its kind."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxformer.blocks import Block
from jaxformer.costs import count_cross_operations, count_operations
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.execution.attention_backends import ADDED_TO_SCORES
from jaxformer.parameters import abstract_module
from jaxformer.planning.block_widths import BlockWidths
from jaxformer.training.config import PairTrainConfig, TrainConfig
from jaxformer.transformer_lm import TransformerLM

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """Blocks of one stack that have the same parameters.

    Attributes:
        prefix: of the paths of its block's parameters.
        block: one of them, abstract.
        layers: how many layers there are of it.
        blocks: how many blocks: fewer where layers share their weights.
        widths: of its arrays.
        tokens: that a device computes at once.
        length: of a row, in tokens.
        source_length: of what its cross-attention reads, in tokens; 0 without one.
        is_fused: whether a fused kernel may compute its attention.
    """

    prefix: str
    block: Block
    layers: int
    blocks: int
    widths: BlockWidths
    tokens: int
    length: int
    source_length: int
    is_fused: bool

    @property
    def sums(self) -> int:
        """How many sums over devices along ``tensor`` a pass makes: one of each branch."""
        return 3 if self.source_length else 2

    def operations(self) -> dict[str, int]:
        """Returns the operations of a forward pass, per row: see ``count_operations``."""
        counts = count_operations(self.block, self.length)
        if not self.source_length:
            return counts
        cross = count_cross_operations(self.block, self.length, self.source_length)
        return {name: counts[name] + cross[name] for name in counts}

    def kept(self, remat: str, width: int) -> int:
        """Returns the bytes that a layer keeps of all tokens for its backward pass.

        Args:
            remat: see ``TrainConfig``.
            width: of a number, in bytes.
        """
        kept = width * self.widths.kept(remat)
        numbers = 0
        if remat == "none":
            # A fused kernel keeps one number for each query, the plain one all its weights.
            numbers = 1 if self.is_fused else self.length
        if self.source_length:
            kept += width * self.widths.kept_across(remat)
            if remat == "none":
                numbers += 1 if self.is_fused else self.source_length
        kept += FLOAT32 * self.widths.heads * numbers
        of_source = 0 if remat == "full" else 2 * self.widths.keys
        return self.tokens * kept + width * of_source * self._source_tokens

    @property
    def _source_tokens(self) -> int:
        return self.tokens * self.source_length // self.length


def find_kinds(config: TrainConfig, mesh: Mapping[str, int]) -> tuple[Any, list[BlockKind]]:
    """Returns a model with one block of each kind, abstract, and its kinds.

    Args:
        config: with ``model.vocab_size`` set.
        mesh: sizes of the axes data, fsdp and tensor, and expert where there is one.
    """
    batches = config.accumulation * math.prod(mesh.values()) // mesh["tensor"]
    if isinstance(config, PairTrainConfig):
        return _of_stacks(config, mesh["tensor"], batches)
    model = config.model
    # The first block may lack its norm, and some layers may have one feed-forward.
    keys = [
        (layer == 0 and not model.norm.first_norm, model.has_experts(layer))
        for layer in range(model.num_layers)
    ]
    found = list(dict.fromkeys(keys))
    has_experts = model.feed_forward.experts.num_experts is not None
    dense = [kind for kind, (_, experts) in enumerate(found) if not experts]
    one = model.replace(
        num_layers=len(found),
        full_attention_layers=(),
        layers_without_rotary=(),
        dense_layers=dense if has_experts else (),
        layer_groups=None,
        layers_in_group=1,
    )
    module = abstract_module(lambda rngs: TransformerLM(one, rngs=rngs))
    kinds = [
        BlockKind(
            prefix=f"blocks.{place}.",
            block=module.blocks[place],
            layers=keys.count(key),
            blocks=keys.count(key) if len(found) > 1 else model.num_blocks,
            widths=BlockWidths.of(model, mesh["tensor"], experts=key[1]),
            tokens=config.batch_size * config.window // batches,
            length=config.window,
            source_length=0,
            is_fused=_may_be_fused(config),
        )
        for place, key in enumerate(found)
    ]
    return module, kinds


def _may_be_fused(config: TrainConfig) -> bool:
    """Whether a fused kernel may compute the attention, on devices that have one."""
    part = config.model.attention
    is_plain = part.attention_dropout or part.score_soft_cap is not None
    is_plain = is_plain or config.model.position.positions in ADDED_TO_SCORES
    return config.dtype == "bfloat16" and not is_plain and config.attention_kernel != "plain"


def _of_stacks(config: PairTrainConfig, tensor: int, batches: int) -> tuple[Any, list[BlockKind]]:
    """The same of an encoder and decoder: each stack is of one kind."""
    model = config.model
    one = model.replace(num_encoder_layers=1, num_decoder_layers=1)
    module = abstract_module(lambda rngs: EncoderDecoder(one, rngs=rngs))
    length, source_length = config.row_lengths
    encoder = BlockKind(
        prefix="encoder.blocks.0.",
        block=module.encoder.blocks[0],
        layers=model.num_encoder_layers,
        blocks=model.num_encoder_layers,
        widths=BlockWidths.of(model.encoder, tensor, experts=False),
        tokens=config.batch_size * source_length // batches,
        length=source_length,
        source_length=0,
        is_fused=_may_be_fused(config),
    )
    decoder = dataclasses.replace(
        encoder,
        prefix="decoder.blocks.0.",
        block=module.decoder.blocks[0],
        layers=model.num_decoder_layers,
        blocks=model.num_decoder_layers,
        widths=BlockWidths.of(model, tensor, experts=False),
        tokens=config.batch_size * length // batches,
        length=length,
        source_length=source_length,
    )
    return module, [encoder, decoder]
