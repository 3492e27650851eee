"""What happens between steps to see how good the model is: a validation loss and a text."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array

from jaxformer.char_data import evaluation_windows
from jaxformer.data.text_generation import write_target
from jaxformer.errors import TextError
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.execution.seeds import seed_key
from jaxformer.generation import generate
from jaxformer.parameters import Parameters, merge
from jaxformer.sampling import batch_of
from jaxformer.training.config import PairTrainConfig
from jaxformer.training.experiment import Experiment, ValidationSet
from jaxformer.training.parallel import Strategy

SAMPLE_TEMPERATURE = 0.8


@dataclasses.dataclass(frozen=True)
class _Part:
    """A set to validate with, as ``Strategy.evaluate`` takes it."""

    tokens: Array | None
    starts: np.ndarray
    mask: np.ndarray

    @classmethod
    def of(cls, validation: ValidationSet, strategy: Strategy, window: int) -> "_Part":
        ids, rows = validation.ids, validation.rows
        if ids is not None:
            return cls(strategy.place_tokens(ids), *evaluation_windows(len(ids), window))
        assert rows is not None
        if rows.stride == 1:
            chosen, mask = np.arange(len(rows)), np.ones((len(rows), window), bool)
        else:
            chosen, mask = evaluation_windows(validation.tokens, window)
        arrays = batch_of(rows, chosen)
        mask = mask & (arrays[1] >= 0)
        if not mask.any():
            raise TextError(f"no token of the validation split of {validation.name} counts")
        return cls(None, np.concatenate(arrays, axis=1), mask)


def _writer(experiment: Experiment) -> Callable[..., np.ndarray]:
    """What makes the ids of a sample, (1, n): of pairs the target of the first source."""
    config, count = experiment.config, experiment.config.sample_tokens
    if not isinstance(config, PairTrainConfig):
        prompt = experiment.sample_prompt[None]
        return lambda model, **settings: generate(model, prompt, count, **settings)
    rows = experiment.validation[0].rows
    assert rows is not None
    _, targets, source = rows[0]
    return functools.partial(
        write_target,
        source_BS=source[None, source >= 0],
        tokens=min(count, config.model.context_length - len(config.target_begin)),
        begin=config.target_begin,
        last_ids=[int(targets[targets >= 0][-1])],
    )


class Evaluator:
    """Evaluates parameters on the whole validation split, and writes texts with them.

    Args:
        experiment: the run.
        strategy: on whose devices the parameters lie.
    """

    def __init__(self, experiment: Experiment, strategy: Strategy):
        config = experiment.config
        self._strategy = strategy
        self._parts = [_Part.of(one, strategy, config.window) for one in experiment.validation]
        self._batch_size = strategy.evaluation_batch_size
        self._tokenizer = experiment.tokenizer
        self._write = _writer(experiment)
        self._seed = config.seed

    def validation_losses(
        self, parameters: Parameters, stopped: Callable[[], bool]
    ) -> list[float] | None:
        """Returns the mean loss of each set of ``Experiment.validation``, in nats per token.

        Args:
            parameters: placed.
            stopped: called before every batch; if it returns True, the result is None.
        """
        losses = []
        for part in self._parts:
            loss = self._strategy.evaluate(
                parameters, part.tokens, part.starts, part.mask, self._batch_size, stopped
            )
            if loss is None:
                return None
            losses.append(loss)
        return losses

    def sample(self, parameters: Parameters, step: int) -> str:
        """Returns a text that the model writes; each step has a text of its own.

        Args:
            parameters: as numpy arrays.
            step: how many optimizer steps they have behind them.
        """
        model = merge(self._strategy.spec.definition, parameters)
        # The kernel that the settings name is for training, not for a token at a time.
        with attention_kernel("auto"):
            key = jax.random.fold_in(seed_key(self._seed), step)
            ids = self._write(model, key=key, temperature=SAMPLE_TEMPERATURE)[0]
        return self._tokenizer.decode(ids[ids < self._tokenizer.vocabulary_size()])
