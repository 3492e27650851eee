"""Sides of benchmarks/peers.py that trace a plain PyTorch program into JAX."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from peer_models import StaticCache, cache_shape, plain_gpt
from peer_sides import Side, Task, UnableError, optax_optimizer


class JittedTorch(Side):
    """The plain PyTorch model, traced by a library into JAX, with optax's AdamW.

    ``loss(parameters, inputs, targets, key, training)`` is the library's.
    """

    loss: Callable[..., Any]
    parameters: Any

    def __init__(self, task: Task):
        import jax
        import optax

        super().__init__(task)
        self.make()
        optimizer = optax_optimizer(task.config.optimizer)
        self.state = optimizer.init(self.parameters)
        self.key = jax.random.key(task.config.seed)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(parameters: Any, state: Any, inputs: Any, targets: Any, key: Any) -> Any:
            loss, gradients = jax.value_and_grad(self.loss)(parameters, inputs, targets, key, True)
            updates, state = optimizer.update(gradients, state, parameters)
            return optax.apply_updates(parameters, updates), state, loss

        self.step = step
        self.score = jax.jit(lambda p, inputs, targets: self.loss(p, inputs, targets, None, False))

    def make(self) -> None:
        """Makes ``parameters`` and ``loss``."""
        raise NotImplementedError

    def train(self, starts: np.ndarray) -> float:
        import jax

        for inputs, targets in zip(*self.task.windows(starts), strict=True):
            self.key, key = jax.random.split(self.key)
            self.parameters, self.state, loss = self.step(
                self.parameters, self.state, inputs, targets, key
            )
        return float(loss)

    def evaluate(self, starts: np.ndarray) -> float:
        windows = zip(*self.task.windows(starts), strict=True)
        return float(sum(self.score(self.parameters, *batch) for batch in windows)) / len(starts)

    def reset(self) -> None:
        self.state = None
        self.make()


class Torchax(JittedTorch):
    """torchax, by ``extract_jax``, and one compiled step a token with a static cache."""

    def make(self) -> None:
        torchax = _import_torchax()
        self.model = plain_gpt(self.task.config.model, self.task.weights)
        self.env = torchax.default_env()
        self.parameters, function = torchax.extract_jax(self.model)

        def loss(parameters: Any, inputs: Any, targets: Any, key: Any, training: bool) -> Any:
            self.model.train(training)
            with self.env.override_property(prng=key):
                return function(parameters, (inputs, targets))

        self.loss = loss
        self.next_token: Any = None

    def _make_next_token(self) -> Any:
        import jax
        import torch

        model = self.model.eval()

        @functools.partial(jax.jit, donate_argnums=1)
        def next_token(parameters: Any, buffers: Any, ids: Any, positions: Any) -> Any:
            parameters, buffers, ids, positions = self.env.j2t_iso(
                (parameters, buffers, ids, positions)
            )
            with self.env:
                caches = [StaticCache(*pair) for pair in buffers]
                swapped = torch.nn.utils.stateless._reparametrize_module(model, parameters)
                with swapped:
                    token = model.next_logits(ids, caches, positions).argmax(-1, keepdim=True)
                found = token, [(cache.keys, cache.values) for cache in caches]
            return self.env.t2j_iso(found)

        return next_token

    def write(self, prompt: np.ndarray, count: int) -> np.ndarray:
        import jax.numpy as jnp

        self.next_token = self.next_token or self._make_next_token()
        config, (batch, length) = self.task.config.model, prompt.shape
        shape = cache_shape(config, batch, length + count)
        buffers = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers)]
        ids, positions, written = jnp.asarray(prompt, jnp.int32), jnp.arange(length), []
        for i in range(count):
            ids, buffers = self.next_token(self.parameters, buffers, ids, positions)
            written.append(ids)
            positions = jnp.array([length + i])
        return np.concatenate(written, axis=1)


def _import_torchax() -> Any:
    """Returns torchax, whose 0.0.13 names operators that torch 2.13 no longer has.

    For the time of the import they are there, and do nothing: the model does not use them.
    """
    from unittest import mock

    import torch

    space, packet = type(torch.ops.aten), type(torch.ops.aten.add)
    finds = {kind: kind.__getattr__ for kind in (space, packet)}

    def find(self: Any, name: str) -> Any:
        try:
            return finds[type(self)](self, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return mock.MagicMock(name=name)

    with (
        mock.patch.object(space, "__getattr__", find),
        mock.patch.object(packet, "__getattr__", find),
    ):
        import torchax

        torchax.default_env()  # which imports the operators
    return torchax


class Torch2Jax(JittedTorch):
    """torch2jax, by ``t2j``, with the operators that it lacks added by ``implements``."""

    def make(self) -> None:
        import torch2jax

        _add_operators()
        model = plain_gpt(self.task.config.model, self.task.weights)
        self.parameters = {name: torch2jax.t2j(p) for name, p in model.named_parameters()}
        function = torch2jax.t2j(model)

        def loss(parameters: Any, inputs: Any, targets: Any, key: Any, training: bool) -> Any:
            model.train(training)
            return function(inputs, targets, state_dict=parameters, rng=key)

        self.loss = loss

    def write(self, prompt: np.ndarray, count: int) -> np.ndarray:
        raise UnableError("torch2jax has no operator that writes into a cache (index_copy_)")


def _add_operators() -> None:
    """Adds what the model needs and torch2jax 0.1.0 raises on.

    It has a GELU, which is always the tanh one, as JAX's is by default: it gets both.
    """
    import jax
    import jax.numpy as jnp
    import torch
    from torch.nn import functional
    from torch2jax import Torchish, implements, mk_rng

    @implements(functional.embedding)
    def embedding(ids: Any, weight: Any, *_: Any, **__: Any) -> Any:
        return weight.value[ids.value]

    @implements(functional.cross_entropy)
    def cross_entropy(logits: Any, targets: Any, *_: Any, **__: Any) -> Any:
        log_p = jax.nn.log_softmax(logits.value)
        return -jnp.mean(jnp.take_along_axis(log_p, targets.value[:, None], axis=-1))

    @implements(functional.gelu)
    def gelu(x: Any, approximate: str = "none") -> Any:
        return jax.nn.gelu(x.value, approximate=approximate == "tanh")

    @implements(functional.scaled_dot_product_attention)
    def attention(q: Any, k: Any, v: Any, *, dropout_p: float = 0.0, is_causal: bool) -> Any:
        assert is_causal
        scores = q.value @ jnp.swapaxes(k.value, -1, -2) / np.sqrt(q.shape[-1])
        allowed = np.tril(np.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf))
        if dropout_p:
            kept = jax.random.bernoulli(mk_rng(), 1 - dropout_p, weights.shape)
            weights = jnp.where(kept, weights / (1 - dropout_p), 0)
        return weights @ v.value

    def chunk(self: Any, count: int, dim: int) -> tuple[Any, ...]:
        return tuple(map(Torchish, jnp.split(self.value, count, axis=dim)))

    Torchish.chunk = chunk
    # Its own take no last dimension, and no device.
    Torchish.flatten = lambda x, first=0, last=-1: Torchish(
        x.value.reshape(*x.shape[:first], -1, *(x.shape[last + 1 :] if last >= 0 else ()))
    )
    Torchish.device = torch.device("cpu")
    implements(torch.arange)(lambda count, **_: jnp.arange(count))
