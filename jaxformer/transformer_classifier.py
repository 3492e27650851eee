"""A transformer that gives scores to labels: of whole texts, or of each of their tokens."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.builders import make_classifier_head
from jaxformer.config import TransformerClassifierConfig
from jaxformer.heads import classified
from jaxformer.initializers import initialize
from jaxformer.transformer_lm import TransformerLM


class TransformerClassifier(TransformerLM):
    """Computes scores of labels from tokens (arXiv 1810.04805, section 4).

    The body is that of a language model, with the same attributes; ``classifier`` stands in place
    of its head. Answers to questions are found with two labels, of which one scores each token as
    the first of the answer and the other as the last.

    Args:
        config: the settings.
        rngs: where the initial weights come from.
    """

    config: TransformerClassifierConfig

    def __init__(self, config: TransformerClassifierConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.classifier = make_classifier_head(config, rngs=rngs)
        initialize(self.classifier, config.initialization, config.num_layers, rngs)

    def __call__(  # type: ignore[override]
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B N T S"] | None = None,
        token_types: Int[Array, "B T"] | None = None,
        *,
        task_types: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B O"] | Float[Array, "B T O"]:
        """Returns the scores of labels, of a text (B, labels) or of each token (B, T, labels).

        Args:
            tokens: ids in [0, V); the caller has checked them.
            mask: True = may attend. A key that no query of its row may see is padding: the last
                token, and the mean of all, are then those of the others.
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
        tokens: Int[Array, "B C T"],
        mask: Bool[Array, "B C N T S"] | None = None,
        token_types: Int[Array, "B C T"] | None = None,
        *,
        positions: Int[Array, "B C T"] | None = None,
    ) -> Float[Array, "B C"]:
        """Returns the score of each of C choices (arXiv 1810.04805, section 4.4).

        Arguments as in ``__call__``, with an axis C of choices; the model has one label.
        """
        arrays = (tokens, mask, token_types)
        flat = [None if x is None else jnp.reshape(x, (-1, *x.shape[2:])) for x in arrays]
        at = None if positions is None else jnp.reshape(positions, (-1, positions.shape[2]))
        scores = self(*flat, positions=at)  # type: ignore[arg-type]
        return jnp.reshape(scores, tokens.shape[:2])

    def __repr__(self) -> str:
        """Returns the settings and the number of parameters; ``nnx.display`` shows the modules."""
        count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))
        return f"<TransformerClassifier, {count:,} parameters: {self.config}>"
