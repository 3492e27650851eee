"""What happens between steps to see how good the model is: a validation loss and a text."""

from collections.abc import Callable

import jax

from jaxformer.char_data import evaluation_windows
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.generation import generate
from jaxformer.parameters import Parameters, merge
from jaxformer.training.experiment import Experiment
from jaxformer.training.parallel import Strategy

SAMPLE_TEMPERATURE = 0.8


class Evaluator:
    """Evaluates parameters on the whole validation split, and writes texts with them.

    Args:
        experiment: the run.
        strategy: on whose devices the parameters lie.
    """

    def __init__(self, experiment: Experiment, strategy: Strategy):
        config, ids = experiment.config, experiment.validation_ids
        self._strategy = strategy
        self._tokens = strategy.place_tokens(ids)
        self._starts, self._mask = evaluation_windows(len(ids), config.window)
        self._batch_size = strategy.evaluation_batch_size
        self._tokenizer = experiment.tokenizer
        self._prompt = experiment.sample_prompt
        self._sample_tokens = config.sample_tokens
        self._seed = config.seed

    def validation_loss(self, parameters: Parameters, stopped: Callable[[], bool]) -> float | None:
        """Returns the mean loss in nats per token.

        Args:
            parameters: placed.
            stopped: called before every batch; if it returns True, the result is None.
        """
        return self._strategy.evaluate(
            parameters, self._tokens, self._starts, self._mask, self._batch_size, stopped
        )

    def sample(self, parameters: Parameters, step: int) -> str:
        """Returns a text that the model writes; each step has a text of its own.

        Args:
            parameters: as numpy arrays.
            step: how many optimizer steps they have behind them.
        """
        model = merge(self._strategy.spec.definition, parameters)
        # The kernel that the settings name is for training, not for a token at a time.
        with attention_kernel("auto"):
            ids = generate(
                model,
                self._prompt[None],
                self._sample_tokens,
                temperature=SAMPLE_TEMPERATURE,
                key=jax.random.fold_in(jax.random.key(self._seed), step),
            )[0]
        return self._tokenizer.decode(ids[ids < self._tokenizer.vocabulary_size()])
