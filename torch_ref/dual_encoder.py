"""Texts and images side by side: CLIP or SigLIP, by its settings."""

import torch
from torch import nn

from torch_ref.config_dual_encoder import DualEncoderConfig
from torch_ref.heads import Similarity
from torch_ref.initializers import initialize
from torch_ref.layers import Linear
from torch_ref.transformer_lm import TransformerLM
from torch_ref.vision_transformer import VisionTransformer


class DualEncoder(nn.Module):
    """Computes which texts and which images fit together (CLIP, arXiv 2103.00020, figure 3).

    Each text and each image becomes one vector; the logits are the similarities of the vectors.

    Args:
        config: the settings.
        generator: where the initial weights come from; default torch's global one.
    """

    def __init__(self, config: DualEncoderConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        text, vision, width = config.text, config.vision, config.projection_width
        self.text = TransformerLM(text, generator=generator)
        self.vision = VisionTransformer(vision, generator=generator)

        def projection(features: int, scheme: str) -> Linear | None:
            if width is None:
                return None
            made = Linear(features, width, use_bias=False)
            initialize(made, scheme, 1, generator)
            return made

        self.text_projection = projection(text.d_model, text.initialization)
        self.image_projection = projection(vision.vector_width, vision.initialization)
        self.similarity = Similarity(use_bias=config.similarity_bias)

    def forward(
        self,
        tokens: torch.Tensor,
        images: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the logits (images, texts), in nats.

        A softmax over the texts of an image says which of them describes it; the transpose has the
        logits of each text. With a bias a sigmoid says of each pair alone whether it fits.

        Args:
            tokens: ids (B, T) of texts.
            images: pixels (M, C, Y, X); there may be more or fewer than texts.
            mask: of the texts (B, N, T, S), True = may attend.
            positions: of the tokens; default 0 … T - 1.

        Raises:
            ValueError: see ``TransformerLM`` and ``VisionTransformer``.
        """
        seen = self.image_vectors(images)
        similarities: torch.Tensor = self.similarity(
            seen, self.text_vectors(tokens, mask, positions=positions)
        )
        return similarities

    def text_vectors(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns each text as a vector (B, P), of any length. Arguments as in ``forward``.

        A text without its end token becomes the output of its first token.
        """
        hidden = self.text.hidden(tokens, mask, positions=positions)
        config = self.config
        if config.text_vector == "pooler":
            vectors = self.text.pooled(hidden)
        else:
            ends = tokens
            if config.text_vector == "end_token":
                # Of several the first; argmax takes no booleans.
                ends = torch.eq(tokens, config.end_token or 0).long()
            place_B = ends.argmax(dim=1)
            vectors = hidden[torch.arange(len(hidden), device=hidden.device), place_B]
        return vectors if self.text_projection is None else self.text_projection(vectors)

    def image_vectors(self, images: torch.Tensor) -> torch.Tensor:
        """Returns each image (M, C, Y, X) as a vector (M, P), of any length."""
        hidden = self.vision.hidden(images)
        # Without return_weights there is one result.
        assert not isinstance(hidden, tuple)
        vectors = self.vision.pooled(hidden)
        return vectors if self.image_projection is None else self.image_projection(vectors)
