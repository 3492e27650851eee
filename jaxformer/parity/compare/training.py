"""Training side by side: the first step, and the first parameter, at which two models part."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import OptimizerConfig
from jaxformer.errors import UsageError
from jaxformer.layers import Dropout, dropout_modules, inject_keep_masks, seed_dropout
from jaxformer.losses import cross_entropy
from jaxformer.optimizers import make_optimizer
from jaxformer.parameters import merge, split
from jaxformer.parity.matching.alibi_slopes import match_alibi_slopes
from jaxformer.parity.matching.rotary_tables import share_tables_of_length
from jaxformer.parity.report.model import Difference, Report, Step
from jaxformer.parity.tolerance import MIDDLE, ROUNDOFF
from jaxformer.parity.trace import jax_trace as jax_trace
from jaxformer.parity.trace import torch_trace as torch_trace
from jaxformer.porting.api import build, import_plan

Batch = tuple[np.ndarray, np.ndarray]
# Our names of parameters, and what theirs were after a step.
Weights = dict[str, np.ndarray]


def compare_training(
    torch_module: Any,
    jax_module: Any = None,
    batches: Callable[[int], Batch] | None = None,
    *,
    steps: int = 20,
    optimizer: OptimizerConfig | None = None,
    dialect: str | None = None,
    dropout: bool = False,
    torch_call: Callable[[Any, Any], Any] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Report:
    """Trains two language models from their weights on the same batches, in float64.

    Each step is AdamW with clipping on the mean cross-entropy. What float64's rounding may do to a
    trajectory is measured, not assumed: theirs is trained a second time in float32, and the line is
    drawn as in ``judge``. Parameters whose gradient is zero in exact arithmetic (key biases) are
    moved by nothing but rounding, which Adam scales up to whole steps; they are not judged.

    Args:
        torch_module: theirs: token ids (B, T) to logits (B, T, V); not changed.
        jax_module: ours; default what ``from_torch`` makes of theirs.
        batches: inputs and targets (B, T) of each step; default random ones of 2 · 16 tokens.
        steps: how many.
        optimizer: its settings.
        dialect: whose class theirs is.
        dropout: whether to train with dropout, both sides dropping the same units.
        torch_call: how theirs is called, given it and a tensor of ids; default the module itself.
        about: what to note in the report.

    Raises:
        UsageError: torch is missing, the models do not fit one another, or with ``dropout``, they
            drop in other places.
    """
    torch_trace.require_torch()
    call = torch_call or (lambda module, ids: module(ids))
    config = optimizer or OptimizerConfig(warmup_steps=0, learning_rate=1e-3)
    with jax.enable_x64(True), match_alibi_slopes(torch_module):
        plan = import_plan(torch_module, dialect)
        candidate = build(plan) if jax_module is None else jax_module
        if batches is None:
            batches = _random_batches(candidate.config.vocab_size)
        runs = [
            _Reference(torch_module, plan, config, call, wide=wide, dropout=dropout)
            for wide in (True, False)
        ]
        exact = jax_trace.in_dtype(candidate, "float64")
        with torch_trace.everything_in_float64():
            share_tables_of_length(exact, runs[0].module, call, batches(0)[0].shape[1])
        mine = _Candidate(exact, config, dropout=dropout)
        found = []
        for number in range(steps):
            batch = batches(number)
            wide, masks = runs[0].step(number, batch)
            narrow, _ = runs[1].step(number, batch, masks)
            loss = mine.step(batch, masks)
            found.append(_judged(number, loss, wide, narrow, mine, runs))
    return Report("train", "float64", (), (), tuple(found), dict(about or {}))


def _judged(
    number: int,
    loss: float,
    wide: float,
    narrow: float,
    mine: "_Candidate",
    runs: Sequence["_Reference"],
) -> Step:
    """One step: the loss, or the parameter that differs most if one differs too much."""
    unit = ROUNDOFF["float32"]
    allowed = MIDDLE * max(unit * abs(wide), abs(narrow - wide))
    difference = Difference(abs(loss - wide), abs(wide), allowed)
    exact, low = runs[0].weights(), runs[1].weights()
    worst, badness = "", 0.0
    for name, value in exact.items():
        if name in runs[0].idle:
            continue
        scale = float(np.max(np.abs(value)))
        noise = float(np.max(np.abs(low[name] - value)))
        error = float(np.max(np.abs(mine.parameters[name] - value)))
        line = MIDDLE * max(unit * scale, noise)
        if error / line > badness:
            worst, badness = name, error / line
            if badness > 1 and not difference.is_bug:
                difference = Difference(error, scale, line)
    return Step(number, loss, wide, difference, worst=worst if difference.is_bug else "")


class _Reference:
    """Their run, in float64 or in float32."""

    def __init__(
        self,
        module: Any,
        plan: Any,
        config: OptimizerConfig,
        call: Callable[[Any, Any], Any],
        *,
        wide: bool,
        dropout: bool,
    ):
        import torch_ref.optimizers

        self.module = torch_trace.in_float64(module) if wide else copy.deepcopy(module).float()
        self.module.train() if dropout else self.module.eval()
        self.plan, self.config, self.call, self.wide = plan, config, call, wide
        self.optimizer = torch_ref.optimizers.make_optimizer(self.module, _reference(config))
        self.idle: set[str] = set()

    def step(
        self, number: int, batch: Batch, masks: list[np.ndarray] | None = None
    ) -> tuple[float, list[np.ndarray]]:
        """One update; the loss before it, and what each dropout kept, in the order of calls."""
        import torch

        import torch_ref.optimizers

        inputs, targets = (torch.as_tensor(np.asarray(a, np.int64)) for a in batch)
        wide = torch_trace.everything_in_float64() if self.wide else contextlib.nullcontext()
        with wide, shared_dropout(number, masks) as kept:
            logits = torch_trace.first_float(self.call(self.module, inputs))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        if number == 0 and self.wide:
            self._find_idle()
        if self.config.clip_norm is not None:
            torch_ref.optimizers.clip_by_global_norm(self.module, self.config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = torch_ref.optimizers.learning_rate(_reference(self.config), number)
        self.optimizer.step()
        return float(loss.detach()), kept

    def weights(self) -> Weights:
        """Their parameters by our names, in float64."""
        return self._candidate({n: p.detach() for n, p in self.module.named_parameters()})

    def _find_idle(self) -> None:
        gradients = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        mine = self._candidate(gradients)
        largest = max(float(np.abs(g).max()) for g in mine.values())
        self.idle = {
            n for n, g in mine.items() if float(np.abs(g).max()) <= ROUNDOFF["float32"] * largest
        }

    def _candidate(self, tensors: Mapping[str, Any]) -> Weights:
        arrays = {n: t.cpu().double().numpy() for n, t in tensors.items()}
        found: Weights = {}
        for link in self.plan.links:
            if all(name in arrays for name in link.source):
                made = link.to_target([arrays[name] for name in link.source])
                found.update({n: a.copy() for n, a in zip(link.target, made, strict=True)})
        return found


class _Candidate:
    """Our run, in float64."""

    def __init__(self, module: Any, config: OptimizerConfig, *, dropout: bool):
        self.definition, self.parameters = split(module)
        self.config, self.dropout = config, dropout
        self.optimizer = make_optimizer(config)
        self.state = self.optimizer.init(self.parameters)
        self.places: list[tuple[str, tuple[int, ...]]] | None = None
        self._step = jax.jit(self._update)

    def step(self, batch: Batch, masks: Sequence[np.ndarray]) -> float:
        """One update; the loss before it."""
        inputs, targets = (jnp.asarray(a) for a in batch)
        loss, self.parameters, self.state = self._step(
            self.parameters, self.state, inputs, targets, self._named(inputs, masks)
        )
        return float(loss)

    def _update(
        self, parameters: Any, state: Any, inputs: Any, targets: Any, masks: dict[str, Any]
    ) -> Any:
        def loss(parameters: Any) -> Any:
            model = merge(self.definition, parameters)
            model.train() if self.dropout else model.eval()
            inject_keep_masks(model, masks)
            return cross_entropy(model(inputs), targets)

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = self.optimizer.update(gradients, state, parameters)
        return value, jax.tree.map(jnp.add, parameters, updates), state

    def _named(self, inputs: Any, masks: Sequence[np.ndarray]) -> dict[str, Any]:
        """Their masks by our places of dropout, which are called in the same order."""
        if not self.dropout:
            return {}
        if self.places is None:
            self.places = self._find_places(inputs)
        reference = [mask.shape for mask in masks]
        if [shape for _, shape in self.places] != reference:
            raise UsageError(
                "the two models drop in other places: ours "
                + ", ".join(f"{path} {shape}" for path, shape in self.places)
                + f"; theirs {', '.join(map(str, reference))}"
            )
        return {path: jnp.asarray(m) for (path, _), m in zip(self.places, masks, strict=True)}

    def _find_places(self, inputs: Any) -> list[tuple[str, tuple[int, ...]]]:
        model = merge(self.definition, self.parameters)
        model.train()
        seed_dropout(model, jax.random.key(0))
        paths = {id(d): path for path, d in dropout_modules(model).items() if d.rate > 0}
        places = []
        original = Dropout.keep

        def keep(self: Dropout, shape: tuple[int, ...]) -> Any:
            if id(self) in paths:
                places.append((paths[id(self)], shape))
            return original(self, shape)

        with mock.patch.object(Dropout, "keep", keep):
            model(inputs)
        return places


@contextlib.contextmanager
def shared_dropout(
    seed: int, masks: Sequence[np.ndarray] | None = None
) -> Iterator[list[np.ndarray]]:
    """Makes torch drop what is given, or what is drawn here; yields what was kept, call by call."""
    torch = torch_trace.require_torch()
    functional = torch.nn.functional
    rng = np.random.default_rng(seed)
    waiting = None if masks is None else list(masks)
    kept: list[np.ndarray] = []

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or p == 0:
            return x
        keep = rng.random(tuple(x.shape)) >= p if waiting is None else waiting.pop(0)
        kept.append(keep)
        return torch.where(torch.as_tensor(keep), x / (1 - p), torch.zeros((), dtype=x.dtype))

    fused = functional.scaled_dot_product_attention

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if dropout_p == 0:
            return fused(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (
                x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value)
            )
        scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return dropout(scores.softmax(-1), dropout_p) @ value

    saved = functional.dropout, functional.scaled_dot_product_attention
    functional.dropout, functional.scaled_dot_product_attention = dropout, attention
    try:
        yield kept
    finally:
        functional.dropout, functional.scaled_dot_product_attention = saved


def _reference(config: OptimizerConfig) -> Any:
    import torch_ref.config

    return torch_ref.config.OptimizerConfig(**dataclasses.asdict(config))


def _random_batches(vocab_size: int) -> Callable[[int], Batch]:
    def batch(number: int) -> Batch:
        ids = np.random.default_rng(number).integers(0, vocab_size, (2, 17))
        return ids[:, :-1], ids[:, 1:]

    return batch
