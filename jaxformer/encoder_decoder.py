"""The encoder, the decoder, and the sequence-to-sequence Transformer made of both."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention import LayerCache
from jaxformer.blocks import Norm, run_blocks, self_attention_mask
from jaxformer.builders import make_block, make_model_norm, make_position_embedding
from jaxformer.config import EncoderDecoderConfig, TransformerConfig
from jaxformer.initializers import initialize
from jaxformer.layers import Dropout, Embedding, Linear
from jaxformer.positions import embed_tokens
from jaxformer.prompts import check_tokens

Hidden = Float[Array, "B T D"]


class Encoder(nnx.Module):
    """Runs blocks that see both directions, then a norm (arXiv 1706.03762, section 3.1).

    Args:
        config: the settings of its layers.
        num_layers: how many.
        rngs: where the initial weights come from.
    """

    def __init__(self, config: TransformerConfig, num_layers: int, *, rngs: nnx.Rngs):
        self.window = config.attention.sliding_window
        self.blocks = nnx.List([make_block(config, rngs=rngs) for _ in range(num_layers)])
        self.final_norm = make_model_norm(config) if config.norm.final_norm else None

    def __call__(
        self,
        x: Hidden,
        mask: Bool[Array, "B N T T"] | None = None,
        *,
        positions: Int[Array, "B T"] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Returns the encoded sequence, with ``return_weights`` also each layer's weights.

        Args:
            x: embedded tokens.
            mask: True = may attend.
            positions: see ``MultiHeadAttention``.
            return_weights: also return the weights.
        """
        length = x.shape[1]
        mask = self_attention_mask(length, length, causal=False, window=self.window, mask=mask)
        x, weights = run_blocks(
            self.blocks, x, mask, positions=positions, return_weights=return_weights
        )
        if self.final_norm is not None:
            x = self.final_norm(x)
        return (x, weights) if return_weights else x


class Decoder(nnx.Module):
    """Runs blocks that also attend to an encoder's output, then a norm (arXiv 1706.03762, 3.1).

    Args:
        config: the settings of its layers.
        num_layers: how many.
        causal: whether a position is kept from later ones.
        rngs: where the initial weights come from.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_layers: int,
        *,
        causal: bool = True,
        rngs: nnx.Rngs,
    ):
        self.causal = causal
        self.window = config.attention.sliding_window
        self.blocks = nnx.List(
            [make_block(config, cross_attention=True, rngs=rngs) for _ in range(num_layers)]
        )
        self.final_norm = make_model_norm(config) if config.norm.final_norm else None

    def __call__(
        self,
        x: Hidden,
        memory: Float[Array, "B S D"],
        mask: Bool[Array, "B N T T"] | None = None,
        memory_mask: Bool[Array, "B N T S"] | None = None,
        *,
        positions: Int[Array, "B T"] | None = None,
        cache: list[LayerCache] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Returns the decoded sequence, with ``return_weights`` also each self-attention's weights.

        Args:
            x: embedded tokens.
            memory: the encoder's output.
            mask: of the self-attention, True = may attend; joined with the causal mask.
            memory_mask: of the cross-attention.
            positions: see ``MultiHeadAttention``.
            cache: one ``LayerCache`` a layer, which this call extends.
            return_weights: also return the weights.
        """
        mask = self_attention_mask(
            x.shape[1],
            x.shape[1] if cache is None else cache[0].slots,
            causal=self.causal,
            window=self.window,
            start=0 if cache is None else cache[0].length,
            mask=mask,
        )
        x, weights = run_blocks(
            self.blocks,
            x,
            mask,
            memory,
            memory_mask,
            positions=positions,
            cache=cache,
            return_weights=return_weights,
        )
        if self.final_norm is not None:
            x = self.final_norm(x)
        return (x, weights) if return_weights else x


class EncoderDecoder(nnx.Module):
    """Computes logits of target tokens from source and target tokens (arXiv 1706.03762).

    Args:
        config: the settings.
        rngs: where the initial weights come from.
    """

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.source_embedding = Embedding(config.source_vocab_size, config.d_model, rngs=rngs)
        self.target_embedding = Embedding(config.target_vocab_size, config.d_model, rngs=rngs)
        self.position_embedding = make_position_embedding(config, rngs=rngs)
        self.source_embedding_norm = (
            make_model_norm(config) if config.embedding.embedding_norm else None
        )
        self.target_embedding_norm = (
            make_model_norm(config) if config.embedding.embedding_norm else None
        )
        self.source_embedding_dropout = Dropout(config.embedding.embedding_dropout)
        self.target_embedding_dropout = Dropout(config.embedding.embedding_dropout)
        self.encoder = Encoder(config, config.num_encoder_layers, rngs=rngs)
        self.decoder = Decoder(config, config.num_decoder_layers, causal=config.causal, rngs=rngs)
        self.lm_head = Linear(
            config.d_model, config.target_vocab_size, use_bias=config.head_bias, rngs=rngs
        )
        initialize(self, config.initialization, config.num_decoder_layers, rngs)

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        source_mask: Bool[Array, "B N S S"] | None = None,
        target_mask: Bool[Array, "B N T T"] | None = None,
        memory_mask: Bool[Array, "B N T S"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Returns the logits of each next target token, in nats.

        Args:
            source: ids of the source sequence.
            target: ids of the target sequence so far.
            source_mask: of the encoder's self-attention, True = may attend.
            target_mask: of the decoder's self-attention.
            memory_mask: of the cross-attention; by default all of the source is seen, its padding
                too.

        Raises:
            ValueError: a sequence is longer than ``context_length``.
        """
        memory = self.encode(source, source_mask)
        return self.lm_head(self.decode(target, memory, target_mask, memory_mask))

    def encode(
        self, source: Int[Array, "B S"], source_mask: Bool[Array, "B N S S"] | None = None
    ) -> Float[Array, "B S D"]:
        """Returns the encoder's output."""
        x = self._embed(source, self.source_embedding, self.source_embedding_norm)
        return self.encoder(self.source_embedding_dropout(x), source_mask)

    def decode(
        self,
        target: Int[Array, "B T"],
        memory: Float[Array, "B S D"],
        target_mask: Bool[Array, "B N T T"] | None = None,
        memory_mask: Bool[Array, "B N T S"] | None = None,
    ) -> Hidden:
        """Returns the decoder's output, before the head."""
        x = self._embed(target, self.target_embedding, self.target_embedding_norm)
        return self.decoder(self.target_embedding_dropout(x), memory, target_mask, memory_mask)

    def _embed(self, tokens: Int[Array, "B T"], embedding: Embedding, norm: Norm | None) -> Hidden:
        check_tokens(tokens)
        x = embed_tokens(
            tokens,
            embedding,
            self.position_embedding,
            context_length=self.config.context_length,
            scale=self.config.embedding.embedding_scale,
        )
        return x if norm is None else norm(x)

    def __repr__(self) -> str:
        """Returns the settings and the number of parameters; ``nnx.display`` shows the modules."""
        count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))
        return f"<EncoderDecoder, {count:,} parameters: {self.config}>"
