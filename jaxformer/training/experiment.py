"""What a run starts from: the settings with all that follows from the corpus, and its state."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.char_data import CharTokenizer, train_validation_split
from jaxformer.checkpoints import GROUPS, Arrays, Cast
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.data.corpora import Corpus
from jaxformer.errors import DeviceError, UsageError
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.execution.layer_scan import scanned_layers
from jaxformer.execution.rematerialization import rematerialization
from jaxformer.parameters import Parameters, abstract, split
from jaxformer.train_step import Definition, TrainState
from jaxformer.training.config import TrainConfig
from jaxformer.training.parallel.strategies import (
    DataParallel,
    MeshParallel,
    Strategy,
    check_batch_size,
    check_mesh,
)
from jaxformer.training.states import check_arrays, from_arrays
from jaxformer.transformer_lm import TransformerLM

# In d_model. At 128 two CPU devices make a step 1.1 times as fast as one that shares each product
# between two cores, and steadier; at 384 they make no difference.
WIDEST_NARROW_MODEL = 256

# In tokens that one call takes on each device. What a layer of nano or baby makes of so many stays
# in a CPU's cache: the evaluation is 1.4 times as fast as with 4 or 8 times as many.
CPU_EVALUATION_TOKENS, EVALUATION_TOKENS = 1024, 16384


class Tokenizer(Protocol):
    """Text to ids and back."""

    def vocabulary_size(self) -> int:
        """How many different ids there are."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, int32."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        ...


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run starts from in place of random weights.

    Attributes:
        source: where it comes from, for the record.
        model: its settings.
        arrays: ``parameters`` by our names; with ``mu``, ``nu`` and ``step`` where the run is to go
            on with their optimizer's state.
        tokenizer: of its text.
        files: copied into the run's folder, where whoever opens the run needs them: a
            ``tokenizer.json``.
    """

    source: str
    model: TransformerLMConfig
    arrays: Arrays
    tokenizer: Tokenizer
    files: Sequence[Path] = ()

    @property
    def step(self) -> int:
        """How many steps were made already."""
        return int(self.arrays.get("step", 0))


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Settings with all that follows from the corpus: nothing is left to be filled in.

    Attributes:
        config: with ``model.vocab_size`` set.
        optimizer: with ``decay_steps`` set.
        corpus: the text.
        tokenizer: of its characters, or that of the model it starts from.
        train_ids: the first 90 % of it, int32.
        validation_ids: the rest.
        start: what it starts from, if not from random weights.
    """

    config: TrainConfig
    optimizer: OptimizerConfig
    corpus: Corpus
    tokenizer: Tokenizer
    train_ids: np.ndarray
    validation_ids: np.ndarray
    start: Start | None = None

    @classmethod
    def prepare(
        cls,
        config: TrainConfig,
        corpus: Corpus,
        *,
        start: Start | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> "Experiment":
        """Reads the corpus into ids and completes the settings.

        Args:
            config: the settings; those of the model are ``start.model`` or differ from it on
                purpose.
            corpus: the text.
            start: what to start from.
            tokenizer: of a resumed run that started from something; default that of ``start``, or
                one of the corpus's own characters.

        Raises:
            TextError: a split is shorter than a window, or holds what the tokenizer does not know.
            UsageError: the vocabulary does not fit ``model.vocab_size``.
        """
        if tokenizer is None:
            tokenizer = (
                CharTokenizer.train_from_text(corpus.text) if start is None else start.tokenizer
            )
        train_ids, validation_ids = train_validation_split(
            tokenizer.encode(corpus.text), config.model.context_length
        )
        size = config.model.vocab_size or tokenizer.vocabulary_size()
        if size < tokenizer.vocabulary_size():
            raise UsageError(
                f"--vocab-size {size} is less than the {tokenizer.vocabulary_size()} "
                + (f"characters of {corpus.name}" if start is None else "tokens of the tokenizer")
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
            start,
        )

    @property
    def vocabulary(self) -> str | None:
        """The characters in the order of their ids; None where tokens are not characters."""
        known = self.tokenizer
        return "".join(known.vocabulary) if isinstance(known, CharTokenizer) else None

    @property
    def first_ids(self) -> np.ndarray:
        """What a sample is begun with: a new line, or the first token."""
        known = self.tokenizer
        if isinstance(known, CharTokenizer) and "\n" not in known.vocabulary:
            return np.zeros(1, np.int32)
        ids = np.asarray(known.encode("\n"), np.int32)
        return ids if len(ids) else np.zeros(1, np.int32)


def choose_devices(config: TrainConfig) -> list[jax.Device]:
    """The first ``config.devices`` of each process, or all of them, process by process.

    Where there is only a CPU, JAX is told to take it for that many devices, unless it has already
    begun to use it. By default a narrow model is spread over all cores that its batch divides by:
    its products are so small that to share each among cores costs more than it saves.

    Raises:
        DeviceError: there are fewer.
    """
    count, cores = config.devices, os.cpu_count() or 1
    wanted = 1 if count is None else count
    if count is None and config.model.d_model <= WIDEST_NARROW_MODEL:
        wanted = max(n for n in range(1, cores + 1) if _divides(config, n))
    told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if 1 < wanted <= cores and not told and jax.config.values["jax_num_cpu_devices"] < 1:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", wanted)
    here = len(jax.local_devices())
    if count is not None and count > here:
        raise DeviceError(f"--devices {count}: this process has {here}")
    return [
        device
        for process in range(jax.process_count())
        for device in jax.local_devices(process)[:count]
    ]


def _divides(config: TrainConfig, devices: int) -> bool:
    """Whether mesh and batch divide over so many devices; where nothing does, one is as good."""
    with contextlib.suppress(DeviceError):
        check_devices(config, devices)
        return True
    return devices == 1


def make_parameters(config: TransformerLMConfig, seed: int) -> tuple[Definition, Parameters]:
    """A model's definition and its initial parameters, drawn in one compiled call."""
    definition, _ = abstract(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    return definition, jax.jit(lambda: draw_parameters(config, seed))()


def draw_parameters(config: TransformerLMConfig, seed: int) -> Parameters:
    """A model's initial parameters; to be compiled, as one by one they take much longer."""
    return split(TransformerLM(config, rngs=nnx.Rngs(seed)))[1]


def first_state(experiment: Experiment, strategy: Strategy, cast: Cast | None = None) -> TrainState:
    """The state before the first step, placed: random weights, or what the run starts from.

    Args:
        experiment: what to do.
        strategy: where it is placed.
        cast: changes dtypes; without it they must be those that training keeps.

    Raises:
        CheckpointError: what it starts from does not fit the settings; all that does not is listed.
        UsageError: it has as many steps behind it as the run is to have, or more.
    """
    config, start = experiment.config, experiment.start
    if start is None:
        return strategy.initial_state(lambda: draw_parameters(config.model, config.seed))
    if start.step >= config.steps:
        raise UsageError(
            f"{start.source} has {start.step} steps behind it: give more --steps, or "
            "--fresh-optimizer to begin at step 0"
        )
    groups = tuple(group for group in GROUPS if group in start.arrays)
    check_arrays(start.arrays, config.model, groups, cast=cast is not None)
    arrays: Arrays = {
        group: {
            name: np.asarray(array) if cast is None else cast(f"{group}/{name}", np.asarray(array))
            for name, array in start.arrays[group].items()
        }
        for group in groups
    }
    arrays["step"] = start.step
    if "mu" not in arrays:
        zeros = jax.tree.map(np.zeros_like, arrays["parameters"])
        arrays = arrays | {"mu": zeros, "nu": zeros, "step": 0}
    placed: TrainState = strategy.place(from_arrays(arrays, config.model, experiment.optimizer)[1])
    return placed


def make_strategy(experiment: Experiment, devices: Sequence[jax.Device]) -> Strategy:
    """The steps of an experiment on ``devices``, as its settings say.

    Raises:
        DeviceError: the mesh or the batch does not divide over them.
    """
    config = experiment.config
    model = config.model
    definition, shapes = abstract(lambda: TransformerLM(model, rngs=nnx.Rngs(0)))
    settings: dict[str, Any] = {
        "shapes": shapes,
        "seed": config.seed,
        "batch_size": config.batch_size,
        "accumulation": config.accumulation,
        "context_length": model.context_length,
        "compute_dtype": compute_dtype(config),
        "uses_dropout": uses_dropout(model),
        "devices": devices,
    }
    if config.strategy == "pmap":
        return DataParallel(definition, experiment.optimizer, **settings)
    return MeshParallel(
        definition,
        experiment.optimizer,
        fsdp=config.fsdp,
        tensor=config.tensor,
        **settings,
    )


def evaluation_batch_size(config: TrainConfig, devices: Sequence[jax.Device]) -> int:
    """The windows that one call of the evaluation takes on each device."""
    if config.eval_batch_size is not None:
        return config.eval_batch_size
    tokens = CPU_EVALUATION_TOKENS if devices[0].platform == "cpu" else EVALUATION_TOKENS
    return max(1, tokens // config.model.context_length)


def check_devices(config: TrainConfig, count: int) -> None:
    """Checks that the mesh and the batch divide over so many devices.

    Raises:
        DeviceError: they do not; the message names what does.
    """
    check_mesh(count, config.fsdp, config.tensor)
    check_batch_size(config.batch_size, config.accumulation, count, config.tensor)


@contextlib.contextmanager
def run_as(config: TrainConfig) -> Iterator[None]:
    """Within it, models are traced to run as the settings say, with the same numbers."""
    with (
        rematerialization(config.remat),
        attention_kernel(config.attention_kernel),
        scanned_layers(config.scan_layers),
    ):
        yield


def compute_dtype(config: TrainConfig) -> jnp.dtype | None:
    """What parameters are cast to for a step; None leaves them."""
    return jnp.dtype(jnp.bfloat16) if config.dtype == "bfloat16" else None


def uses_dropout(config: TransformerLMConfig) -> bool:
    """Whether any place of dropout has a rate above zero."""
    return any(
        getattr(config, field.name) > 0
        for field in dataclasses.fields(config)
        if field.name.endswith("_dropout")
    )
