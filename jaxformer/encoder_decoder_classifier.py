"""An encoder and decoder that gives scores to labels: of texts, or of each of their tokens."""

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.builders import make_classifier_head
from jaxformer.config_classifiers import EncoderDecoderClassifierConfig
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.heads import classified
from jaxformer.initializers import initialize


class EncoderDecoderClassifier(EncoderDecoder):
    """Computes scores of labels from a text (BART, arXiv 1910.13461, section 3).

    The text is source and target: the target is the same tokens behind the start token, without the
    last. Scores are made of what the decoder gives at the end token, which is the last of a text.

    Args:
        config: the settings.
        rngs: where the initial weights come from.
    """

    config: EncoderDecoderClassifierConfig

    def __init__(self, config: EncoderDecoderClassifierConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.classifier = make_classifier_head(config, rngs=rngs)
        initialize(self.classifier, config.initialization, config.num_decoder_layers, rngs)

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        source_mask: Bool[Array, "B N S S"] | None = None,
        target_mask: Bool[Array, "B N T T"] | None = None,
        memory_mask: Bool[Array, "B N T S"] | None = None,
        *,
        source_positions: Int[Array, "B S"] | None = None,
        target_positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B O"] | Float[Array, "B T O"]:
        """Returns the scores of labels, of a text (B, labels) or of each token (B, T, labels).

        Arguments as in ``EncoderDecoder``. Which token of a text is its last, ``source_mask`` says.

        Raises:
            ValueError: a sequence is longer than ``context_length``.
        """
        memory = self.encode(source, source_mask, positions=source_positions)
        hidden = self.decode(target, memory, target_mask, memory_mask, positions=target_positions)
        return self.classifier(classified(hidden, source_mask, self.config.classifier.classified))
