"""The encoder, the decoder, and the sequence-to-sequence Transformer made of both."""

from typing import Any

import torch
from torch import nn

from torch_ref.attention import LayerCache
from torch_ref.blocks import Norm, run_blocks, self_attention_mask
from torch_ref.builders import make_block, make_model_norm, make_position_embedding
from torch_ref.config import EncoderDecoderConfig, TransformerConfig
from torch_ref.initializers import initialize
from torch_ref.layers import Dropout, Embedding, Linear
from torch_ref.positions import embed_tokens
from torch_ref.prompts import check_tokens

Hidden = torch.Tensor


class Encoder(nn.Module):
    """Runs blocks that see both directions, then a norm (arXiv 1706.03762, section 3.1).

    Args:
        config: the settings of its layers.
        num_layers: how many.
    """

    def __init__(self, config: TransformerConfig, num_layers: int):
        super().__init__()
        self.window = config.attention.sliding_window
        self.blocks = nn.ModuleList([make_block(config) for _ in range(num_layers)])
        self.final_norm = make_model_norm(config) if config.norm.final_norm else None

    def forward(
        self,
        x: Hidden,
        mask: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
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


class Decoder(nn.Module):
    """Runs blocks that also attend to an encoder's output, then a norm (arXiv 1706.03762, 3.1).

    Args:
        config: the settings of its layers.
        num_layers: how many.
        causal: whether a position is kept from later ones.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_layers: int,
        *,
        causal: bool = True,
    ):
        super().__init__()
        self.causal = causal
        self.window = config.attention.sliding_window
        self.blocks = nn.ModuleList(
            [make_block(config, cross_attention=True) for _ in range(num_layers)]
        )
        self.final_norm = make_model_norm(config) if config.norm.final_norm else None

    def forward(
        self,
        x: Hidden,
        memory: torch.Tensor,
        mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
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
            x.shape[1] if cache is None else cache[0].k_BSKH.shape[1],
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


class EncoderDecoder(nn.Module):
    """Computes logits of target tokens from source and target tokens (arXiv 1706.03762).

    Args:
        config: the settings.
        generator: where the initial weights come from; default torch's global one.
    """

    def __init__(self, config: EncoderDecoderConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        self.source_embedding = Embedding(config.source_vocab_size, config.d_model)
        self.target_embedding = Embedding(config.target_vocab_size, config.d_model)
        self.position_embedding = make_position_embedding(config)
        self.source_embedding_norm = (
            make_model_norm(config) if config.embedding.embedding_norm else None
        )
        self.target_embedding_norm = (
            make_model_norm(config) if config.embedding.embedding_norm else None
        )
        self.source_embedding_dropout = Dropout(config.embedding.embedding_dropout)
        self.target_embedding_dropout = Dropout(config.embedding.embedding_dropout)
        self.encoder = Encoder(config, config.num_encoder_layers)
        self.decoder = Decoder(config, config.num_decoder_layers, causal=config.causal)
        self.lm_head = Linear(config.d_model, config.target_vocab_size, use_bias=config.head_bias)
        initialize(self, config.initialization, config.num_decoder_layers, generator)

    def forward(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_mask: torch.Tensor | None = None,
        target_mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
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

    def encode(self, source: torch.Tensor, source_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the encoder's output."""
        x = self._embed(source, self.source_embedding, self.source_embedding_norm)
        return self.encoder(self.source_embedding_dropout(x), source_mask)

    def decode(
        self,
        target: torch.Tensor,
        memory: torch.Tensor,
        target_mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
    ) -> Hidden:
        """Returns the decoder's output, before the head."""
        x = self._embed(target, self.target_embedding, self.target_embedding_norm)
        return self.decoder(self.target_embedding_dropout(x), memory, target_mask, memory_mask)

    def _embed(self, tokens: torch.Tensor, embedding: Embedding, norm: Norm | None) -> Hidden:
        check_tokens(tokens)
        x = embed_tokens(
            tokens,
            embedding,
            self.position_embedding,
            context_length=self.config.context_length,
            scale=self.config.embedding.embedding_scale,
        )
        return x if norm is None else norm(x)
