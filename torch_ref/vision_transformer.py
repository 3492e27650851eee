"""The transformer that sees: ViT, DeiT, DINOv2 or CLIP's half, by its settings."""

from typing import cast

import torch
from torch import nn

from torch_ref.blocks import Block, run_blocks
from torch_ref.builders import (
    make_attention_pooling,
    make_block,
    make_model_norm,
    make_patch_embedding,
)
from torch_ref.config_vision import VisionTransformerConfig
from torch_ref.initializers import initialize
from torch_ref.layers import Dropout, Embedding, Linear
from torch_ref.position_builders import make_position_embedding


class VisionTransformer(nn.Module):
    """Computes tokens, or logits of classes, from images (arXiv 2010.11929).

    An image becomes a class token, a distillation token (DeiT, arXiv 2012.12877) and its patches,
    as the settings say; then follow positions, blocks, final norm, pooling and head.

    Args:
        config: the settings.
        generator: where the initial weights come from; default torch's global one.
    """

    def __init__(
        self, config: VisionTransformerConfig, *, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.config = config
        part, head = config.patches, config.image_head

        def row(wanted: bool) -> Embedding | None:
            return Embedding(1, config.d_model) if wanted else None

        self.patch_embedding = make_patch_embedding(config)
        self.class_token = row(part.class_token)
        self.distillation_token = row(part.distillation_token)
        self.mask_token = row(part.mask_token)
        self.position_embedding = make_position_embedding(config)
        self.embedding_norm = make_model_norm(config) if config.embedding.embedding_norm else None
        self.embedding_dropout = Dropout(config.embedding.embedding_dropout)
        self.blocks = nn.ModuleList(
            [make_block(config, layer, causal=False) for layer in range(config.num_layers)]
        )
        self.final_norm = make_model_norm(config) if config.norm.final_norm else None
        width = config.d_model * (2 if head.pooling == "first_and_mean" else 1)
        scored = config.d_model if head.classes_from == "patches" else width
        self.pooling = make_attention_pooling(config) if head.pooling == "attention" else None
        self.pooler = Linear(width, config.d_model) if head.image_pooler else None
        self.pooled_norm = make_model_norm(config, width) if head.pooled_norm else None
        self.classifier = (
            Linear(scored, head.num_labels, use_bias=head.label_bias) if head.num_labels else None
        )
        self.distillation_classifier = (
            Linear(width, head.num_labels, use_bias=head.label_bias)
            if head.distillation_head
            else None
        )
        initialize(self, config.initialization, config.num_layers, generator)

    @property
    def layers(self) -> list[Block]:
        """The block of every layer, in turn."""
        return [cast(Block, block) for block in self.blocks]

    def forward(
        self,
        images: torch.Tensor,
        masked: torch.Tensor | None = None,
        *,
        return_weights: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the logits of the classes (B, num_labels); without classes what ``hidden`` does.

        Args:
            images: pixels (B, C, Y, X), of the size of the config, scaled as the model was trained
                with.
            masked: patches (B, P), row by row, in whose place the mask token stands.
            return_weights: also return each layer's attention weights, (B, N, T, T).

        Raises:
            ValueError: images have another size, or patches are masked and there is no mask token.
        """
        hidden = self.hidden(images, masked, return_weights=return_weights)
        if self.classifier is None:
            return hidden
        if isinstance(hidden, tuple):
            hidden, weights = hidden
            return self.logits(hidden), weights
        return self.logits(hidden)

    def hidden(
        self,
        images: torch.Tensor,
        masked: torch.Tensor | None = None,
        *,
        return_weights: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the residual stream (B, T, D) after the final norm; arguments as ``forward``."""
        x = self.embed(images, masked)
        x, weights, _ = run_blocks(self.layers, x, return_weights=return_weights)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return (x, weights) if return_weights else x

    def embed(self, images: torch.Tensor, masked: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the input (B, T, D) of the first block. Arguments as in ``forward``."""
        part = self.config.patches
        size = (part.num_channels, part.image_height, part.image_width)
        if images.ndim != 4 or images.shape[1:] != size:
            raise ValueError(f"images must be (B, {size[0]}, {size[1]}, {size[2]}): got shape "
                             f"{tuple(images.shape)}")  # fmt: skip
        x: torch.Tensor = self.patch_embedding(images)
        if masked is not None:
            if self.mask_token is None:
                raise ValueError("masked patches need mask_token=True: got mask_token=False")
            x = torch.where(masked[:, :, None], self._row(self.mask_token, x), x)
        first = [self.class_token, self.distillation_token]
        rows = [self._row(token, x) for token in first if token is not None]
        x = torch.cat([*rows, x], dim=1)
        if self.position_embedding is not None:
            x = x + self.position_embedding(x.shape[1]).to(x.dtype)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        dropped: torch.Tensor = self.embedding_dropout(x)
        return dropped

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits (B, O) of the pooled image, its patches, or two tokens' mean.

        Raises:
            ValueError: there are no classes.
        """
        if self.classifier is None:
            raise ValueError("logits need classes: got num_labels=0")
        is_mean = self.config.image_head.classes_from == "patches"
        scored = self._mean_of_patches(hidden) if is_mean else self.pooled(hidden)
        logits: torch.Tensor = self.classifier(scored)
        if self.distillation_classifier is None:
            return logits
        # DeiT (arXiv 2012.12877, section 4), whose mean is that of the scores.
        return (logits + self.distillation_classifier(hidden[:, 1])) / 2

    def pooled(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns each image as one vector: of its first token, of all, or what a query gathers.

        Normalised where the config says so; with a pooler tanh(pooler(x)) of that.
        """
        x = hidden[:, 0] if self.pooling is None else self.pooling(hidden)
        if self.config.image_head.pooling == "first_and_mean":
            x = torch.cat((x, self._mean_of_patches(hidden)), dim=-1)
        if self.pooled_norm is not None:
            x = self.pooled_norm(x)
        return x if self.pooler is None else torch.tanh(self.pooler(x))

    def _mean_of_patches(self, hidden: torch.Tensor) -> torch.Tensor:
        part = self.config.patches
        return hidden[:, part.num_tokens - part.num_patches :].mean(dim=1)

    @staticmethod
    def _row(token: Embedding, x: torch.Tensor) -> torch.Tensor:
        row: torch.Tensor = token(torch.zeros((len(x), 1), dtype=torch.int64, device=x.device))
        return row
