"""Twenty steps of a small model on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.char_data import window_starts
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.parameters import abstract, split
from jaxformer.train_step import TrainState
from jaxformer.training.parallel import MeshStrategy, PmapStrategy, StepSpec
from jaxformer.transformer_lm import TransformerLM

# 34 tokens, 4 heads and widths of 24 and 40 are what 8 and 2 x 4 devices can share.
LENGTH, BATCH, STEPS = 13, 16, 20
SIZES = {"vocab_size": 34, "context_length": LENGTH, "d_model": 24, "num_heads": 4, "d_ff": 40}
LLAMA = TransformerLMConfig(
    **SIZES, num_layers=1, num_kv_heads=2, activation="swiglu", norm="rms_norm", positions="rotary",
    query_key_norm=True, qkv_bias=False, feed_forward_bias=False,
)  # fmt: skip
# One key/value head, a vocabulary that nothing divides, a mask that is no plain triangle.
ODD = TransformerLMConfig(
    **(SIZES | {"vocab_size": 29}), num_layers=1, num_kv_heads=1, positions="relative",
    max_relative_position=5, tie_embeddings=False, head_bias=True, sliding_window=6,
    score_soft_cap=20.0, block="parallel", branch_output_norm=True,
)  # fmt: skip
OPTIMIZER = OptimizerConfig(warmup_steps=5, decay_steps=40, learning_rate=3e-3, clip_norm=0.5)
IDS = (np.arange(400) * 7 + np.random.default_rng(5).integers(0, 3, 400)).astype(np.int32) % 29

# (devices, fsdp, tensor), and expert where several devices share the experts; None is pmap.
MESHES = {
    "pmap 8": (8, None, None),
    "data 8": (8, 1, 1),
    "fsdp 8": (8, 8, 1),
    "fsdp 4 x tensor 2": (8, 4, 2),
    "data 2 x fsdp 2 x tensor 2": (8, 2, 2),
    "mesh of one": (1, 1, 1),
}


# Every mesh is compared with pmap on one device.
ONE = (1, None, None)


def dropping(config):
    """The same model with dropout at three places."""
    return dataclasses.replace(
        config, embedding_dropout=0.1, attention_dropout=0.2, residual_dropout=0.1
    )


@functools.cache
def parameter_shapes(config):
    return abstract(lambda rngs: TransformerLM(config, rngs=rngs))


@functools.cache
def make(config, mesh, accumulation=1, batch_size=BATCH, optimizer=OPTIMIZER):
    devices, fsdp, tensor, *experts = MESHES.get(mesh, mesh)
    definition, shapes = parameter_shapes(config)
    spec = StepSpec(
        definition=definition,
        shapes=shapes,
        optimizer=optimizer,
        seed=1,
        batch_size=batch_size,
        accumulation=accumulation,
        context_length=LENGTH,
        uses_dropout=config.block.residual_dropout > 0,
    )
    devices = jax.local_devices()[:devices]
    if fsdp is None:
        return PmapStrategy(spec, devices)
    return MeshStrategy(spec, devices, fsdp=fsdp, tensor=tensor, expert=(experts or [1])[0])


@functools.cache
def parameters_of(config):
    _, parameters = split(TransformerLM(config, rngs=nnx.Rngs(0)))
    return {name: np.asarray(p, jnp.float64) for name, p in parameters.items()}


def state_of(config, optimizer=OPTIMIZER):
    return TrainState.create(parameters_of(config), optimizer)


def run_with(strategy, config, per_call=STEPS):
    """Losses of twenty steps, and the state after the last."""
    state = strategy.place(state_of(config, strategy.spec.optimizer))
    tokens = strategy.place_tokens(IDS)
    losses = []
    for first in range(0, STEPS, per_call):
        # As many rows in every call, so that one program serves all of them.
        starts = np.zeros((STEPS, BATCH), np.int32)
        for i in range(per_call):
            starts[i] = window_starts(1, first + i, BATCH, len(IDS) - LENGTH)
        state, history = strategy.train(state, tokens, starts, per_call)
        losses.extend(history["train_loss"])
    return np.asarray(losses), state


def run(config, mesh, accumulation=1, per_call=STEPS):
    """``run_with`` on a mesh by name."""
    return run_with(make(config, mesh, accumulation), config, per_call)


def fetch(config, mesh, accumulation=1, per_call=STEPS):
    """Losses of ``run``, and the parameters as numpy arrays."""
    losses, state = run(config, mesh, accumulation, per_call)
    return losses, make(config, mesh, accumulation).fetch(state.parameters)
