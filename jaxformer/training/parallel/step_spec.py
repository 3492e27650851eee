"""What one training step computes, on whatever devices it runs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxformer.config import EncoderDecoderConfig, OptimizerConfig, TransformerLMConfig
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.hardware.matrix_products import Library, named_library
from jaxformer.parameters import abstract
from jaxformer.train_step import Definition, TrainState
from jaxformer.training.config import PairTrainConfig, TrainConfig
from jaxformer.transformer_lm import TransformerLM

RowKind = Literal["ids", "targets", "documents", "pairs"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepSpec:
    """A model without its parameters, and the settings of its training step.

    Attributes:
        definition: the model's structure.
        shapes: shape and dtype of every parameter, by path.
        optimizer: its settings, with ``decay_steps`` set.
        seed: of dropout.
        batch_size: B, windows per step over all devices and micro-batches.
        accumulation: micro-batches per step.
        context_length: T, in tokens.
        compute_dtype: what parameters are cast to for a step; None leaves them as they are.
        uses_dropout: whether any dropout rate is above zero.
        eval_batch_size: windows that a device evaluates at a time; None is what suits it.
        row: what a row of a batch is: T+1 ids; inputs and targets, some of which do not count;
            also segments, which say where its documents are; or, of pairs, a source.
        source_length: S, in tokens, of pairs; 0 elsewhere.
        products: whose custom calls compute products, see ``called_products``; None are XLA's.
    """

    definition: Definition
    shapes: Mapping[str, Any]
    optimizer: OptimizerConfig
    seed: int
    batch_size: int
    accumulation: int = 1
    context_length: int
    compute_dtype: jnp.dtype | None = None
    uses_dropout: bool = True
    eval_batch_size: int | None = None
    row: RowKind = "ids"
    source_length: int = 0
    products: Library | None = None

    @property
    def row_parts(self) -> tuple[int, ...]:
        """How many numbers each array of a row has."""
        length = self.context_length
        return {
            "ids": (length + 1,),
            "targets": (length, length),
            "documents": (length, length, length),
            "pairs": (length, length, self.source_length),
        }[self.row]

    @property
    def row_length(self) -> int:
        """How many numbers a row has."""
        return sum(self.row_parts)

    @classmethod
    def from_config(cls, config: TrainConfig, row: RowKind = "ids") -> "StepSpec":
        """Returns the step of a run; this is where a run builds its abstract model, once.

        Args:
            config: with ``model.vocab_size`` set. Without ``decay_steps`` the learning rate decays
                over all steps.
            row: what a row of a batch is.
        """
        model, optimizer = config.model, config.optimizer
        definition, shapes = abstract(lambda rngs: make_model(model, rngs))
        return cls(
            definition=definition,
            shapes=shapes,
            optimizer=dataclasses.replace(
                optimizer, decay_steps=optimizer.decay_steps or config.steps
            ),
            seed=config.seed,
            batch_size=config.batch_size,
            accumulation=config.accumulation,
            context_length=config.window,
            compute_dtype=jnp.dtype(jnp.bfloat16) if config.dtype == "bfloat16" else None,
            uses_dropout=any(
                rate > 0 for name, rate in model.settings().items() if name.endswith("_dropout")
            ),
            eval_batch_size=config.eval_batch_size,
            row=row,
            source_length=config.source_room if isinstance(config, PairTrainConfig) else 0,
            products=named_library(config.products),
        )

    def state_shapes(self) -> TrainState:
        """Returns the training state with a ``jax.ShapeDtypeStruct`` for every array."""
        shapes: TrainState = jax.eval_shape(
            lambda parameters: TrainState.create(parameters, self.optimizer), dict(self.shapes)
        )
        return shapes


def make_model(
    config: TransformerLMConfig | EncoderDecoderConfig, rngs: Any
) -> TransformerLM | EncoderDecoder:
    """Returns the model of these settings, with weights drawn from ``rngs``."""
    if isinstance(config, EncoderDecoderConfig):
        return EncoderDecoder(config, rngs=rngs)
    return TransformerLM(config, rngs=rngs)
