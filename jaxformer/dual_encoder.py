"""Texts and images side by side: CLIP or SigLIP, by its settings."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.config_dual_encoder import DualEncoderConfig
from jaxformer.heads import Similarity
from jaxformer.initializers import initialize
from jaxformer.layers import Linear
from jaxformer.transformer_lm import TransformerLM
from jaxformer.vision_transformer import VisionTransformer


class DualEncoder(nnx.Module):
    """Computes which texts and which images fit together (CLIP, arXiv 2103.00020, figure 3).

    Each text and each image becomes one vector; the logits are the similarities of the vectors.

    Args:
        config: the settings.
        rngs: where the initial weights come from.
    """

    def __init__(self, config: DualEncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        text, vision, width = config.text, config.vision, config.projection_width
        self.text = TransformerLM(text, rngs=rngs)
        self.vision = VisionTransformer(vision, rngs=rngs)

        def projection(features: int, scheme: str) -> Linear | None:
            if width is None:
                return None
            made = Linear(features, width, use_bias=False, rngs=rngs)
            initialize(made, scheme, 1, rngs)
            return made

        self.text_projection = projection(text.d_model, text.initialization)
        self.image_projection = projection(vision.vector_width, vision.initialization)
        self.similarity = Similarity(use_bias=config.similarity_bias)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        images: Float[Array, "M C Y X"],
        mask: Bool[Array, "B N T S"] | None = None,
        *,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "M B"]:
        """Returns the logits (images, texts), in nats.

        A softmax over the texts of an image says which of them describes it; the transpose has the
        logits of each text. With a bias a sigmoid says of each pair alone whether it fits.

        Args:
            tokens: ids of texts.
            images: pixels; there may be more or fewer than texts.
            mask: of the texts, True = may attend.
            positions: of the tokens; default 0 … T - 1.

        Raises:
            ValueError: see ``TransformerLM`` and ``VisionTransformer``.
        """
        seen = self.image_vectors(images)
        return self.similarity(seen, self.text_vectors(tokens, mask, positions=positions))

    def text_vectors(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B N T S"] | None = None,
        *,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B P"]:
        """Returns each text as a vector, of any length. Arguments as in ``__call__``.

        A text without its end token becomes the output of its first token.
        """
        hidden = self.text.hidden(tokens, mask, positions=positions)
        config = self.config
        if config.text_vector == "pooler":
            vectors = self.text.pooled(hidden)
        else:
            ends = tokens if config.text_vector == "highest_token" else tokens == config.end_token
            place_B = jnp.argmax(ends, axis=1)
            vectors = jnp.take_along_axis(hidden, place_B[:, None, None], axis=1)[:, 0]
        return vectors if self.text_projection is None else self.text_projection(vectors)

    def image_vectors(self, images: Float[Array, "M C Y X"]) -> Float[Array, "M P"]:
        """Returns each image as a vector, of any length."""
        # Without return_weights there is one result.
        hidden: Any = self.vision.hidden(images)
        vectors = self.vision.pooled(hidden)
        return vectors if self.image_projection is None else self.image_projection(vectors)

    def __repr__(self) -> str:
        """Returns the settings and the number of parameters; ``nnx.display`` shows the modules."""
        count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))
        return f"<DualEncoder, {count:,} parameters: {self.config}>"
