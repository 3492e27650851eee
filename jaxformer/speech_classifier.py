"""An encoder of sound that gives scores to labels: Whisper's encoder with a head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxformer.blocks import Block, run_blocks
from jaxformer.builders import make_block, make_classifier_head, make_model_norm
from jaxformer.config_speech import SpeechClassifierConfig
from jaxformer.convolutions import SpeechStem
from jaxformer.heads import LayerSum, classified
from jaxformer.initializers import initialize
from jaxformer.layers import Dropout
from jaxformer.position_builders import make_position_embedding


class SpeechClassifier(nnx.Module):
    """Computes scores of labels from frames of features (Whisper, arXiv 2212.04356).

    Two convolutions, ``stem``, make T / 2 positions of the T frames of a mel spectrogram; then
    follow sinusoids, blocks, final norm and classifier.

    Args:
        config: the settings.
        rngs: where the initial weights come from.
    """

    def __init__(self, config: SpeechClassifierConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.stem = SpeechStem(config.features.num_features, config.d_model, rngs=rngs)
        self.position_embedding = make_position_embedding(config, rngs=rngs)
        self.embedding_dropout = Dropout(config.embedding.embedding_dropout)
        self.blocks = nnx.List(
            [
                make_block(config, layer, causal=False, rngs=rngs)
                for layer in range(config.num_layers)
            ]
        )
        self.final_norm = make_model_norm(config) if config.norm.final_norm else None
        self.layer_sum = LayerSum(config.num_layers + 1) if config.layer_sum else None
        self.classifier = make_classifier_head(config, rngs=rngs)
        initialize(self, config.initialization, config.num_layers, rngs)

    @property
    def layers(self) -> list[Block]:
        """The block of every layer, in turn."""
        return list(self.blocks)

    def __call__(self, features: Float[Array, "B C T"]) -> Float[Array, "B ..."]:
        """Returns the scores of labels, of a sound (B, labels) or of each position (B, S, labels).

        Args:
            features: T frames of C numbers, as many as the config says.

        Raises:
            ValueError: features have another shape.
        """
        part = self.config.classifier
        return self.classifier(classified(self.hidden(features), None, part.classified))

    def hidden(self, features: Float[Array, "B C T"]) -> Float[Array, "B S D"]:
        """Returns what is classified: the last residual stream, normalised, or a mean of all.

        The mean is of what enters the first block and of what leaves each; of these the last is
        normalised. Arguments as in ``__call__``.
        """
        x = self.embed(features)
        streams = [x]
        if self.layer_sum is None:
            x, _, _ = run_blocks(self.layers, x)
        else:
            for block in self.layers:
                x, _, _ = run_blocks([block], x)
                streams.append(x)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.layer_sum is None:
            return x
        return self.layer_sum(jnp.stack((*streams[:-1], x)))

    def embed(self, features: Float[Array, "B C T"]) -> Float[Array, "B S D"]:
        """Returns the input of the first block. Arguments as in ``__call__``."""
        self.config.features.check_shape(features.shape)
        x = self.stem(features)
        if self.position_embedding is not None:
            x = x + self.position_embedding(x.shape[1]).astype(x.dtype)
        return self.embedding_dropout(x)

    def __repr__(self) -> str:
        """Returns the settings and the number of parameters; ``nnx.display`` shows the modules."""
        count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))
        return f"<SpeechClassifier, {count:,} parameters: {self.config}>"
