"""A transformer that gives scores to labels: of whole texts, or of each of their tokens."""

import torch

from torch_ref.builders import make_classifier_head
from torch_ref.config import TransformerClassifierConfig
from torch_ref.heads import classified
from torch_ref.initializers import initialize
from torch_ref.transformer_lm import TransformerLM


class TransformerClassifier(TransformerLM):
    """Computes scores of labels from tokens (arXiv 1810.04805, section 4).

    The body is that of a language model, with the same attributes; ``classifier`` stands in place
    of its head. Answers to questions are found with two labels, of which one scores each token as
    the first of the answer and the other as the last.

    Args:
        config: the settings.
        generator: where the initial weights come from; default torch's global one.
    """

    config: TransformerClassifierConfig

    def __init__(
        self, config: TransformerClassifierConfig, *, generator: torch.Generator | None = None
    ):
        super().__init__(config, generator=generator)
        self.classifier = make_classifier_head(config)
        initialize(self.classifier, config.initialization, config.num_layers, generator)

    def forward(  # type: ignore[override]
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
        *,
        task_types: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the scores of labels, of a text (B, labels) or of each token (B, T, labels).

        Args:
            tokens: ids in [0, V), (B, T); the caller has checked them.
            mask: (B, N, T, S), True = may attend. A key that no query of its row may see is
                padding: the last token, and the mean of all, are then those of the others.
            token_types: kinds of the tokens, in [0, num_token_types); default 0.
            task_types: kinds of their tasks, in [0, num_task_types); default 0.
            positions: of the tokens; default 0 … T - 1.

        Raises:
            ValueError: see ``TransformerLM``.
        """
        hidden = self.hidden(tokens, mask, token_types, task_types=task_types, positions=positions)
        return self.classifier(classified(hidden, mask, self.config.classifier.classified))

    def choose(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the score of each of C choices (arXiv 1810.04805, section 4.4).

        Arguments as in ``forward``, with an axis C of choices, (B, C, T); the model has one label.
        """
        arrays = (tokens, mask, token_types)
        flat = [None if x is None else x.flatten(0, 1) for x in arrays]
        at = None if positions is None else positions.flatten(0, 1)
        return self(*flat, positions=at).reshape(tokens.shape[:2])
