"""An encoder and decoder that gives scores to labels: of texts, or of each of their tokens."""

import torch

from torch_ref.builders import make_classifier_head
from torch_ref.config_classifiers import EncoderDecoderClassifierConfig
from torch_ref.encoder_decoder import EncoderDecoder
from torch_ref.heads import classified
from torch_ref.initializers import initialize


class EncoderDecoderClassifier(EncoderDecoder):
    """Computes scores of labels from a text (BART, arXiv 1910.13461, section 3).

    The text is source and target: the target is the same tokens behind the start token, without the
    last. Scores are made of what the decoder gives at the end token, which is the last of a text.

    Args:
        config: the settings.
        generator: where the initial weights come from; default torch's global one.
    """

    config: EncoderDecoderClassifierConfig

    def __init__(
        self, config: EncoderDecoderClassifierConfig, *, generator: torch.Generator | None = None
    ):
        super().__init__(config, generator=generator)
        self.classifier = make_classifier_head(config)
        initialize(self.classifier, config.initialization, config.num_decoder_layers, generator)

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
        """Returns the scores of labels, of a text (B, labels) or of each token (B, T, labels).

        Arguments as in ``EncoderDecoder``. Which token of a text is its last, ``source_mask`` says.

        Raises:
            ValueError: a sequence is longer than ``context_length``.
        """
        memory = self.encode(source, source_mask, positions=source_positions)
        hidden = self.decode(target, memory, target_mask, memory_mask, positions=target_positions)
        scores: torch.Tensor = self.classifier(
            classified(hidden, source_mask, self.config.classifier.classified)
        )
        return scores
