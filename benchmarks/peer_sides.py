"""Sides of benchmarks/peers.py: what each does, jaxformer, and Flax NNX's own layers.

Those of PyTorch are in peer_torch, those that trace PyTorch into JAX in peer_traced.

All take the same weights, windows, rates of dropout and AdamW at a constant rate. The optimizer is
torch's fused AdamW after ``clip_grad_norm_``, or optax's after ``clip_by_global_norm``; what JAX
compiles has its state donated, but for the naive NNX model.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from peer_models import Weights, naive_nnx


class UnableError(Exception):
    """Says why a side cannot do what it is asked for."""


@dataclasses.dataclass
class Task:
    """What all sides do.

    Attributes:
        config: of the run, a ``TrainConfig``.
        ids: token ids that windows are cut from, int32.
        file: of the first weights, by torch_ref's names, ``.npz``.
    """

    config: Any
    ids: np.ndarray
    file: Path

    @property
    def weights(self) -> Weights:
        """The first weights, read anew: a side of 500 MB has no copy that lies idle."""
        with np.load(self.file) as file:
            return dict(file)

    def windows(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and targets (..., T) of the windows that begin at ``starts``."""
        length = self.config.model.context_length
        rows = self.ids[starts[..., None] + np.arange(length + 1)]
        return np.ascontiguousarray(rows[..., :-1]), np.ascontiguousarray(rows[..., 1:])


class Side:
    """What a side can do; ``starts`` are those of n batches of B windows, (n, B).

    Attributes:
        evaluation_batches: how many windows it may score at a time, of which the fastest is taken.
    """

    evaluation_batches: tuple[int, ...] = (1, 4, 16, 64)

    def __init__(self, task: Task):
        self.task = task

    def train(self, starts: np.ndarray) -> float:
        """Makes n steps; returns the loss of the last one."""
        raise UnableError("it is here for generation alone")

    def evaluate(self, starts: np.ndarray) -> float:
        """Returns the mean loss of all windows without dropout, in nats per token."""
        raise UnableError("it is here for generation alone")

    def write(self, prompt: np.ndarray, count: int) -> np.ndarray:
        """Returns the most probable next tokens of a prompt (B, T), (B, count)."""
        raise NotImplementedError

    def reset(self) -> None:
        """Puts the first weights back; training is over, and its state is forgotten."""


class Jaxformer(Side):
    """jaxformer, as ``train.py`` and ``jaxformer sample`` run it."""

    def __init__(self, task: Task):
        import sides

        from jaxformer.training.parallel.devices import choose_devices
        from jaxformer.training.products import choose_products

        super().__init__(task)
        config = choose_products(task.config, choose_devices(task.config))[0]
        self.side = sides.Jaxformer(config, task.ids, compiles_ahead=True)
        # As many as its trainer takes, whatever is given.
        self.evaluation_batches = (1,)
        self.model: Any = None

    def train(self, starts: np.ndarray) -> float:
        return self.side.train(starts)

    def evaluate(self, starts: np.ndarray) -> float:
        flat = starts.reshape(-1).astype(np.int32)
        mask = np.ones((len(flat), self.task.config.model.context_length), bool)
        return self.side.evaluate(self.side.tokens, (flat, mask))

    def write(self, prompt: np.ndarray, count: int) -> np.ndarray:
        from flax import nnx

        from jaxformer.generation import generate
        from jaxformer.parameters import set_parameters
        from jaxformer.training.initial_state import draw_parameters
        from jaxformer.transformer_lm import TransformerLM

        if self.model is None:
            config = self.task.config
            self.model = TransformerLM(config.model, rngs=nnx.Rngs(0))
            set_parameters(self.model, draw_parameters(config.model, config.seed))
        return generate(self.model, prompt, count, greedy=True)

    def reset(self) -> None:
        from jaxformer.training.initial_state import plan_parameters

        config = self.task.config
        first = plan_parameters(config.model, config.seed)
        self.side.state = self.side.parallel.initial_state(first)


class NaiveNNX(Side):
    """Flax NNX's own layers, ``nnx.Optimizer`` and ``nnx.jit``, as its guides have them."""

    def __init__(self, task: Task):
        from flax import nnx

        super().__init__(task)
        self.model = naive_nnx(task.config.model, task.weights)
        self.optimizer = nnx.Optimizer(
            self.model, optax_optimizer(task.config.optimizer), wrt=nnx.Param
        )
        self.train_step, self.evaluation_step, self.next_token = _nnx_functions()

    def train(self, starts: np.ndarray) -> float:
        self.model.train()
        for inputs, targets in zip(*self.task.windows(starts), strict=True):
            loss = self.train_step(self.model, self.optimizer, inputs, targets)
        return float(loss)

    def evaluate(self, starts: np.ndarray) -> float:
        self.model.eval()
        windows = zip(*self.task.windows(starts), strict=True)
        total = sum(self.evaluation_step(self.model, *batch) for batch in windows)
        return float(total) / len(starts)

    def write(self, prompt: np.ndarray, count: int) -> np.ndarray:
        import jax.numpy as jnp

        # A model of its own: its attentions hold caches. They take one token at a time.
        model = naive_nnx(self.task.config.model, self.task.weights)
        model.eval()
        batch, length = prompt.shape
        for block in model.blocks:
            block.attention.set_attributes(decode=True)
            block.attention.init_cache((batch, length + count, self.task.config.model.d_model))
        written: list[Any] = []
        for i in range(length + count - 1):
            token = jnp.asarray(prompt[:, i : i + 1]) if i < length else written[-1]
            token = self.next_token(model, token, jnp.full((batch, 1), i))
            if i >= length - 1:
                written.append(token)
        return np.concatenate(written, axis=1)

    def reset(self) -> None:
        self.optimizer = None
        self.model = naive_nnx(self.task.config.model, self.task.weights)


def _nnx_functions() -> tuple[Any, Any, Any]:
    import jax.numpy as jnp
    import optax
    from flax import nnx

    def loss_of(model: Any, inputs: Any, targets: Any) -> Any:
        mask = nnx.make_causal_mask(inputs)
        logits = model(inputs, jnp.arange(inputs.shape[1])[None], mask)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    @nnx.jit
    def train_step(model: Any, optimizer: Any, inputs: Any, targets: Any) -> Any:
        loss, gradients = nnx.value_and_grad(loss_of)(model, inputs, targets)
        optimizer.update(model, gradients)
        return loss

    @nnx.jit
    def next_token(model: Any, token: Any, position: Any) -> Any:
        return jnp.argmax(model(token, position), axis=-1)

    return train_step, nnx.jit(loss_of), next_token


def optax_optimizer(settings: Any) -> Any:
    """Returns optax's AdamW at a constant rate after clipping; vectors do not decay."""
    import jax
    import optax

    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            settings.learning_rate, b1=settings.beta1, b2=settings.beta2, eps=settings.eps,
            weight_decay=settings.weight_decay,
            mask=lambda tree: jax.tree.map(lambda x: x.ndim >= 2, tree),
        ),
    )  # fmt: skip
