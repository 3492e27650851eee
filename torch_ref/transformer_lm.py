"""The language model: GPT, LLaMA, BERT or a character model, by its settings."""

from typing import Any, cast

import torch
from torch import nn

from torch_ref.adapters import add_adapters
from torch_ref.attention import LayerCache
from torch_ref.blocks import (
    Block,
    run_blocks,
    self_attention_mask,
    stack_position_bias,
    stack_position_rows,
)
from torch_ref.builders import (
    block_of,
    make_block,
    make_embedding_projection,
    make_head_transform,
    make_lm_head,
    make_model_norm,
    make_output_projection,
    make_stack_position,
)
from torch_ref.config import TransformerLMConfig
from torch_ref.heads import output_logits
from torch_ref.initializers import initialize
from torch_ref.layers import Dropout, Embedding, Linear
from torch_ref.position_builders import make_position_embedding
from torch_ref.positions import embed_tokens
from torch_ref.prompts import check_tokens


class TransformerLM(nn.Module):
    """Computes logits from tokens: embeddings, positions, blocks, final norm, head.

    A tied head multiplies by ``token_embedding`` and has no matrix of its own, at most a bias.

    Args:
        config: the settings.
        generator: where the initial weights come from; default torch's global one.

    Raises:
        ValueError: ``config.vocab_size`` is None.
    """

    def __init__(self, config: TransformerLMConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size must be set before a model is built")
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.embedding_width)
        self.token_type_embedding = (
            Embedding(config.embedding.num_token_types, config.embedding_sum_width)
            if config.embedding.num_token_types
            else None
        )
        self.task_type_embedding = (
            Embedding(config.embedding.num_task_types, config.embedding_sum_width)
            if config.embedding.num_task_types
            else None
        )
        self.position_embedding = make_position_embedding(config)
        self.embedding_norm = (
            make_model_norm(config, config.embedding_sum_width)
            if config.embedding.embedding_norm
            else None
        )
        self.embedding_dropout = Dropout(config.embedding.embedding_dropout)
        self.embedding_projection = make_embedding_projection(config)
        self.position = make_stack_position(config, causal=config.causal)
        self.blocks = nn.ModuleList(
            [make_block(config, layer, causal=config.causal) for layer in range(config.num_blocks)]
        )
        self.final_norm = make_model_norm(config) if config.norm.final_norm else None
        self.final_dropout = Dropout(config.head.final_dropout)
        self.output_projection = make_output_projection(config)
        self.pooler = Linear(config.d_model, config.d_model) if config.head.pooler else None
        self.head_transform = make_head_transform(config)
        self.lm_head = make_lm_head(config.head, config.embedding_width, config.vocab_size)
        initialize(self, config.initialization, config.num_layers, generator)
        if config.lora.lora_rank is not None:
            add_adapters(
                self.blocks,
                config.lora.targets,
                rank=config.lora.lora_rank,
                alpha=config.lora.lora_alpha,
                dropout=config.lora.lora_dropout,
            )

    @property
    def layers(self) -> list[Block]:
        """The block of every layer, in turn; layers may share one (ALBERT, arXiv 1909.11942)."""
        config = self.config
        return [
            cast(Block, self.blocks[block_of(config, layer)]) for layer in range(config.num_layers)
        ]

    def forward(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
        *,
        task_types: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cache: list[LayerCache] | None = None,
        return_weights: bool = False,
        return_routing: bool = False,
    ) -> Any:
        """Returns logits (B, T, V) of the next token, or of this one if not causal, in nats.

        With ``head="none"`` what ``hidden`` returns.

        Args:
            tokens: ids (B, T) in [0, V); the caller has checked them.
            mask: True = may attend; joined with the causal mask and window of the config.
            token_types: kinds of the tokens, (B, T) in [0, num_token_types); default 0.
            task_types: kinds of their tasks, (B, T) in [0, num_task_types); default 0.
            positions: of the tokens, (B, T); default 0 … T - 1.
            cache: one ``LayerCache`` a layer, which this call extends; S is then its length.
            return_weights: also return each layer's attention weights, (B, N, T, S).
            return_routing: also return what each layer's router of experts chose.

        Raises:
            ValueError: the tokens are no ids (B, T), or more than ``context_length``; or there are
                types, and the model has none.
        """
        hidden = self.hidden(
            tokens,
            mask,
            token_types,
            task_types=task_types,
            positions=positions,
            cache=cache,
            return_weights=return_weights,
            return_routing=return_routing,
        )
        if self.config.head.head == "none":
            return hidden
        if isinstance(hidden, tuple):
            hidden, *more = hidden
            return (self.logits(hidden), *more)
        return self.logits(hidden)

    def hidden(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
        *,
        task_types: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cache: list[LayerCache] | None = None,
        return_weights: bool = False,
        return_routing: bool = False,
    ) -> Any:
        """Returns the residual stream (B, T, D) after the final norm; arguments as ``forward``."""
        check_tokens(tokens)
        length = tokens.shape[1]
        start = 0 if cache is None else cache[0].length
        if cache is not None and positions is None:
            positions = torch.arange(start, start + length, device=tokens.device)[None]
        x = self.embed(tokens, positions, token_types, task_types)
        windows = [self.config.window(layer) for layer in range(self.config.num_layers)]
        masks = {
            window: self_attention_mask(
                length,
                length if cache is None else cache[0].k_BSKH.shape[1],
                causal=self.config.causal,
                window=window,
                start=start,
                mask=mask,
                device=tokens.device,
            )
            for window in set(windows)
        }
        x, *found = run_blocks(
            self.layers,
            x,
            [masks[window] for window in windows],
            positions=positions,
            cache=cache,
            position_bias=stack_position_bias(self.position, x, cache),
            position_rows=stack_position_rows(self.position),
            return_weights=return_weights,
            return_routing=return_routing,
        )
        if self.final_norm is not None:
            x = self.final_norm(x)
        x = self.final_dropout(x)
        if self.output_projection is not None:
            x = self.output_projection(x)
        wanted = (return_weights, return_routing)
        more = [each for each, is_wanted in zip(found, wanted, strict=True) if is_wanted]
        return (x, *more) if more else x

    def embed(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
        task_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the input of the first block (B, T, D): rows of tokens, types and positions."""
        types = _type_rows("token", self.token_type_embedding, token_types, tokens)
        tasks = _type_rows("task", self.task_type_embedding, task_types, tokens)
        projection = self.embedding_projection
        is_early = self.config.embedding.projected_embeddings == "tokens"
        x = embed_tokens(
            tokens,
            self.token_embedding,
            self.position_embedding,
            context_length=self.config.context_length,
            projection=projection if is_early else None,
            scale=self.config.embedding.embedding_scale,
            added=types,
            positions=positions,
        )
        x = x if tasks is None else x + tasks
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.embedding_dropout(x)
        return projection(x) if projection and not is_early else x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits (B, T, V) of states (B, T, D).

        Raises:
            ValueError: there is none.
        """
        if self.config.head.head == "none":
            raise ValueError("logits need a head: got head='none'")
        if self.head_transform is not None:
            hidden = self.head_transform(hidden)
        part = self.config.head
        return output_logits(
            hidden,
            self.token_embedding if part.tie_embeddings else None,
            self.lm_head,
            scale=part.logit_scale,
            soft_cap=part.logit_soft_cap,
        )

    def pooled(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns tanh(pooler(x)) (B, D) of one token of ``hidden`` (B, T, D) (BERT's code).

        The config says which token, and whether there is a tanh.

        Raises:
            ValueError: there is no pooler.
        """
        if self.pooler is None:
            raise ValueError("pooled needs a pooler: got pooler=False")
        config = self.config
        pooled: torch.Tensor = self.pooler(
            hidden[:, 0 if config.head.pooled_token == "first" else -1]
        )
        return torch.tanh(pooled) if config.head.pooler_tanh else pooled


def _type_rows(
    name: str, embedding: Embedding | None, types: torch.Tensor | None, tokens: torch.Tensor
) -> torch.Tensor | None:
    """Returns the rows (B, T, E) of the tokens' types, by default of type 0; None without any.

    Raises:
        ValueError: there are types, and no embedding.
    """
    if embedding is not None:
        return embedding(torch.zeros_like(tokens) if types is None else types)
    if types is not None:
        raise ValueError(f"{name}_types need num_{name}_types above 0: got num_{name}_types=0")
    return None
