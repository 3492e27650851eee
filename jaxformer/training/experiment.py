"""What a run starts from: the settings with all that follows from the corpus, and its state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxformer.char_data import CharTokenizer, train_validation_split
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.errors import CheckpointError, DeviceError, UsageError
from jaxformer.optimizers import make_optimizer
from jaxformer.parameters import Parameters, abstract, split
from jaxformer.train_step import Definition, TrainState
from jaxformer.training.checkpoints import GROUPS, Arrays
from jaxformer.training.config import TrainConfig
from jaxformer.training.corpora import Corpus
from jaxformer.transformer_lm import TransformerLM


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Settings with all that follows from the corpus: nothing is left to be filled in.

    Attributes:
        config: with ``model.vocab_size`` set.
        optimizer: with ``decay_steps`` set.
        corpus: the text.
        tokenizer: its characters.
        train_ids: the first 90 % of it, int32.
        validation_ids: the rest.
    """

    config: TrainConfig
    optimizer: OptimizerConfig
    corpus: Corpus
    tokenizer: CharTokenizer
    train_ids: np.ndarray
    validation_ids: np.ndarray

    @classmethod
    def prepare(cls, config: TrainConfig, corpus: Corpus) -> "Experiment":
        """Reads the corpus into ids and completes the settings.

        Raises:
            TextError: a split is shorter than a window.
            UsageError: the vocabulary does not fit ``model.vocab_size``.
        """
        tokenizer = CharTokenizer.train_from_text(corpus.text)
        train_ids, validation_ids = train_validation_split(
            tokenizer.encode(corpus.text), config.model.context_length
        )
        size = config.model.vocab_size or tokenizer.vocabulary_size()
        if size < tokenizer.vocabulary_size():
            raise UsageError(
                f"--vocab-size {size} is less than the {tokenizer.vocabulary_size()} characters "
                f"of {corpus.name}"
            )
        model = dataclasses.replace(config.model, vocab_size=size)
        decay_steps = config.optimizer.decay_steps or config.steps
        return cls(
            dataclasses.replace(config, model=model),
            dataclasses.replace(config.optimizer, decay_steps=decay_steps),
            corpus,
            tokenizer,
            train_ids,
            validation_ids,
        )

    @property
    def vocabulary(self) -> str:
        """The characters in the order of their ids."""
        return "".join(self.tokenizer.vocabulary)


def choose_devices(count: int | None) -> list[jax.Device]:
    """The first ``count`` local devices, or all of them.

    Raises:
        DeviceError: there are fewer.
    """
    devices = jax.local_devices()
    if count is not None and count > len(devices):
        raise DeviceError(f"--devices {count}: this process has {len(devices)}")
    return devices[:count]


def make_parameters(config: TransformerLMConfig, seed: int) -> tuple[Definition, Parameters]:
    """A model's definition and its initial parameters, drawn in one compiled call."""
    definition, _ = abstract(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    return definition, jax.jit(lambda: split(TransformerLM(config, rngs=nnx.Rngs(seed)))[1])()


def to_arrays(state: TrainState) -> Arrays:
    """A state as a checkpoint holds it."""
    return {
        "parameters": state.parameters,
        "mu": optax.tree_utils.tree_get(state.optimizer_state, "mu"),
        "nu": optax.tree_utils.tree_get(state.optimizer_state, "nu"),
        "step": state.step,
    }


def from_arrays(
    arrays: Arrays, model: TransformerLMConfig, optimizer: OptimizerConfig
) -> tuple[Definition, TrainState]:
    """A model's definition and the state that a checkpoint of it holds.

    Raises:
        CheckpointError: the checkpoint's names or shapes are not those of the model; all of them
            are listed.
    """
    definition = check_arrays(arrays, model, GROUPS)
    empty = make_optimizer(optimizer).init(arrays["parameters"])
    step = jnp.int32(arrays["step"])
    optimizer_state = optax.tree_utils.tree_set(empty, mu=arrays["mu"], nu=arrays["nu"], count=step)
    return definition, TrainState(arrays["parameters"], optimizer_state, step)


def check_arrays(
    arrays: Arrays, model: TransformerLMConfig, groups: tuple[str, ...] = ("parameters",)
) -> Definition:
    """The definition of the model that the arrays are of.

    Raises:
        CheckpointError: their names or shapes are not the model's; all of them are listed.
    """
    definition, expected = abstract(lambda: TransformerLM(model, rngs=nnx.Rngs(0)))
    problems = []
    for group in groups:
        found = arrays.get(group, {})
        problems += [f"missing {group}/{name}" for name in sorted(expected.keys() - found.keys())]
        problems += [
            f"unexpected {group}/{name}" for name in sorted(found.keys() - expected.keys())
        ]
        problems += [
            f"{group}/{name} is {found[name].shape}, not {expected[name].shape}"
            for name in sorted(expected.keys() & found.keys())
            if found[name].shape != expected[name].shape
        ]
    if problems:
        raise CheckpointError(f"the checkpoint does not fit its model: {'; '.join(problems)}")
    return definition


def uses_dropout(config: TransformerLMConfig) -> bool:
    """Whether any place of dropout has a rate above zero."""
    return any(
        getattr(config, field.name) > 0
        for field in dataclasses.fields(config)
        if field.name.endswith("_dropout")
    )
