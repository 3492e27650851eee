"""The encoder, the decoder, and the sequence-to-sequence Transformer made of both."""

from typing import Any, Literal

import torch
from torch import nn

from torch_ref.adapters import add_adapters
from torch_ref.attention import LayerCache
from torch_ref.blocks import Norm, run_blocks, self_attention_mask, stack_position_bias
from torch_ref.builders import make_block, make_lm_head, make_model_norm, make_stack_position
from torch_ref.config import EncoderDecoderConfig, TransformerConfig
from torch_ref.heads import output_logits
from torch_ref.initializers import initialize
from torch_ref.layers import Dropout, Embedding
from torch_ref.position_builders import make_position_embedding, make_source_position_embedding
from torch_ref.positions import LearnedPositions, SinusoidalPositions, embed_tokens
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
        self.position = make_stack_position(config, causal=False)
        self.blocks = nn.ModuleList([make_block(config, causal=False) for _ in range(num_layers)])
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
        x, weights, _ = run_blocks(
            self.blocks,
            x,
            mask,
            positions=positions,
            position_bias=stack_position_bias(self.position, x),
            return_weights=return_weights,
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
        self.position = make_stack_position(config, causal=causal)
        self.blocks = nn.ModuleList(
            [make_block(config, causal=causal, cross_attention=True) for _ in range(num_layers)]
        )
        self.final_norm = make_model_norm(config) if config.norm.final_norm else None

    def forward(
        self,
        x: Hidden,
        memory: torch.Tensor | None,
        mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        cache: list[LayerCache] | None = None,
        memory_cache: list[LayerCache] | None = None,
        return_weights: bool | Literal["both"] = False,
    ) -> Any:
        """Returns the decoded sequence, with ``return_weights`` also each self-attention's weights.

        Args:
            x: embedded tokens.
            memory: the encoder's output; None where there is a ``memory_cache``.
            mask: of the self-attention, True = may attend; joined with the causal mask.
            memory_mask: of the cross-attention.
            positions: see ``MultiHeadAttention``.
            cache: one ``LayerCache`` a layer, which this call extends.
            memory_cache: what ``remember`` has made of the memory.
            return_weights: also return the weights; see ``Block``.
        """
        mask = self_attention_mask(
            x.shape[1],
            x.shape[1] if cache is None else cache[0].k_BSKH.shape[1],
            causal=self.causal,
            window=self.window,
            start=0 if cache is None else cache[0].length,
            mask=mask,
        )
        x, weights, _ = run_blocks(
            self.blocks,
            x,
            mask,
            memory,
            memory_mask,
            positions=positions,
            cache=cache,
            position_bias=stack_position_bias(self.position, x, cache),
            memory_cache=memory_cache,
            return_weights=return_weights,
        )
        if self.final_norm is not None:
            x = self.final_norm(x)
        return (x, weights) if return_weights else x

    def remember(self, memory: torch.Tensor) -> list[LayerCache]:
        """Returns the keys and values that the layers make of an encoder's output."""
        attentions: list[Any] = [block.cross_attention for block in self.blocks]
        return [attention.remember(memory) for attention in attentions]


class EncoderDecoder(nn.Module):
    """Computes logits of target tokens from source and target tokens (arXiv 1706.03762).

    With ``shared_embedding`` the table of target tokens serves the source too, and with
    ``tie_embeddings`` the output head.

    Args:
        config: the settings.
        generator: where the initial weights come from; default torch's global one.
    """

    def __init__(self, config: EncoderDecoderConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        part, width = config.embedding, config.d_model
        self.source_embedding = (
            None
            if part.shared_embedding or config.reads_features
            else Embedding(config.source_vocab_size, width)
        )
        self.target_embedding = Embedding(config.target_vocab_size, width)
        self.position_embedding = make_position_embedding(config)
        self.source_position_embedding = make_source_position_embedding(config)
        self.source_embedding_norm = make_model_norm(config) if part.embedding_norm else None
        self.target_embedding_norm = make_model_norm(config) if part.embedding_norm else None
        self.source_embedding_dropout = Dropout(part.embedding_dropout)
        self.target_embedding_dropout = Dropout(part.embedding_dropout)
        self.encoder = Encoder(config.encoder, config.num_encoder_layers)
        self.decoder = Decoder(config, config.num_decoder_layers, causal=config.causal)
        self.source_final_dropout = Dropout(config.head.final_dropout)
        self.target_final_dropout = Dropout(config.head.final_dropout)
        self.lm_head = make_lm_head(config.head, width, config.target_vocab_size)
        initialize(self, config.initialization, config.num_decoder_layers, generator)
        if config.lora.lora_rank is not None:
            for stack in (self.encoder, self.decoder):
                add_adapters(
                    stack.blocks,
                    config.lora.targets,
                    rank=config.lora.lora_rank,
                    alpha=config.lora.lora_alpha,
                    dropout=config.lora.lora_dropout,
                )

    def forward(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_mask: torch.Tensor | None = None,
        target_mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
        *,
        source_positions: torch.Tensor | None = None,
        target_positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the logits of each next target token, in nats.

        With ``head="none"`` what ``decode`` returns.

        Args:
            source: ids of the source sequence.
            target: ids of the target sequence so far.
            source_mask: of the encoder's self-attention, True = may attend.
            target_mask: of the decoder's self-attention.
            memory_mask: of the cross-attention; by default all of the source is seen, its padding
                too.
            source_positions: of the source tokens; default 0 … S - 1.
            target_positions: of the target tokens; default 0 … T - 1.

        Raises:
            ValueError: a sequence is longer than ``context_length``.
        """
        memory = self.encode(source, source_mask, positions=source_positions)
        hidden = self.decode(target, memory, target_mask, memory_mask, positions=target_positions)
        return hidden if self.config.head.head == "none" else self.logits(hidden)

    def encode(
        self,
        source: torch.Tensor,
        source_mask: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Returns the encoder's output, with ``return_weights`` also each layer's weights.

        Arguments as in ``forward``.
        """
        x = self.source_embedding_dropout(self.embed_source(source, positions))
        found = self.encoder(x, source_mask, positions=positions, return_weights=return_weights)
        if return_weights:
            return self.source_final_dropout(found[0]), found[1]
        return self.source_final_dropout(found)

    def embed_source(self, source: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Returns the input (B, S, D) of the encoder's first block. Arguments as in ``encode``."""
        table = self.target_embedding if self.source_embedding is None else self.source_embedding
        at = self.source_position_embedding
        at = self.position_embedding if at is None else at
        return self._embed(source, table, at, self.source_embedding_norm, positions)

    def decode(
        self,
        target: torch.Tensor,
        memory: torch.Tensor | None,
        target_mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        cache: list[LayerCache] | None = None,
        memory_cache: list[LayerCache] | None = None,
        return_weights: bool | Literal["both"] = False,
    ) -> Any:
        """Returns the decoder's output, before the head. Arguments and result as in ``Decoder``."""
        if cache is not None and positions is None:
            start, count = cache[0].length, target.shape[1]
            positions = torch.arange(start, start + count, device=target.device)[None]
        x = self._embed(
            target,
            self.target_embedding,
            self.position_embedding,
            self.target_embedding_norm,
            positions,
        )
        found = self.decoder(
            self.target_embedding_dropout(x),
            memory,
            target_mask,
            memory_mask,
            positions=positions,
            cache=cache,
            memory_cache=memory_cache,
            return_weights=return_weights,
        )
        if return_weights:
            return self.target_final_dropout(found[0]), found[1]
        return self.target_final_dropout(found)

    def attention_weights(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_mask: torch.Tensor | None = None,
        target_mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
    ) -> dict[str, list[torch.Tensor]]:
        """Returns the weights of each layer's attentions, (B, N, queries, keys), after dropout.

        They are those of the ``encoder``, of the ``decoder`` to itself, and ``cross``: of the
        decoder to the source. Arguments as in ``forward``.
        """
        memory, encoder = self.encode(source, source_mask, return_weights=True)
        masks = (target_mask, memory_mask)
        _, pairs = self.decode(target, memory, *masks, return_weights="both")
        decoder, cross = ([pair[i] for pair in pairs] for i in range(2))
        return {"encoder": encoder, "decoder": decoder, "cross": cross}

    def logits(self, hidden: Hidden) -> torch.Tensor:
        """Returns the logits of the output head.

        Raises:
            ValueError: there is none.
        """
        part = self.config.head
        if part.head == "none":
            raise ValueError("logits need a head: got head='none'")
        return output_logits(
            hidden,
            self.target_embedding if part.tie_embeddings else None,
            self.lm_head,
            scale=part.logit_scale,
            soft_cap=part.logit_soft_cap,
        )

    def _embed(
        self,
        tokens: torch.Tensor,
        embedding: Embedding,
        position_embedding: LearnedPositions | SinusoidalPositions | None,
        norm: Norm | None,
        positions: torch.Tensor | None,
    ) -> Hidden:
        check_tokens(tokens)
        x = embed_tokens(
            tokens,
            embedding,
            position_embedding,
            context_length=self.config.context_length,
            scale=self.config.embedding.embedding_scale,
            positions=positions,
        )
        return x if norm is None else norm(x)
