"""The two sides of a benchmark of training: one model, its weights, optimizer and windows.

torch_ref is timed the way PyTorch is at its best: the fused attention with ``is_causal``, fused
AdamW, gradients set to None, as many threads as there are cores, batches that lie on the device
before the clock starts, and no number read back before a turn ends. jaxformer runs as ``train.py``
does, with the products that are faster here.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from measure import on_gpu, rounded, torch_device, wait_for_torch
from stand_ins import limit_torch_compile, uses_only_avx2

from jaxformer.training.config import TrainConfig
from jaxformer.training.presets import PRESETS

JAXFORMER, EAGER, COMPILED = "jaxformer", "torch_ref", "torch_ref compiled"
# bfloat16 parameters in place of torch's autocast, which is what jaxformer does.
CAST = "torch_ref compiled, parameters cast"
NAMES = (JAXFORMER, EAGER, COMPILED, CAST)
# Windows a step that fit a small machine and are timed within minutes; on a GPU the preset's.
CPU_BATCHES = {"nano": 12, "baby": 8, "char-lm": 2, "gpt2-small": 1}
GPU_BATCHES = {"gpt2-small": 32}
SEED = 1337
# Where a model has dropout.
DROPOUT = ("attention_dropout", "embedding_dropout", "output_dropout", "feed_forward_dropout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Returns a command line with the options of every benchmark of a preset."""
    parser.add_argument("--preset", choices=list(PRESETS), default="nano")
    parser.add_argument("--batch-size", type=int, help="windows; default one that fits the machine")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32",
        help="bfloat16 is torch's autocast there, and parameters cast to bfloat16 here",
    )  # fmt: skip
    parser.add_argument(
        "--no-attention-dropout", action="store_true",
        help="on no side: cuDNN's and splash attention's kernels have none",
    )  # fmt: skip
    parser.add_argument("--no-dropout", action="store_true", help="on no side")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--only", action="append", choices=NAMES,
        help="a side that takes part, once for each; default those of the dtype",
    )  # fmt: skip


def side_names(arguments: argparse.Namespace) -> list[str]:
    """Returns the names of the sides that take part, jaxformer first."""
    if arguments.only:
        return [name for name in NAMES if name in arguments.only]
    compiled = [COMPILED, CAST] if arguments.dtype == "bfloat16" else [COMPILED]
    return [JAXFORMER, EAGER, *([] if arguments.no_compile else compiled)]


def make_config(arguments: argparse.Namespace, vocab_size: int = 65) -> TrainConfig:
    """Returns the preset with the command line's changes and every default set."""
    from jaxformer.training.parallel.devices import choose_devices
    from jaxformer.training.products import choose_products

    config = PRESETS[arguments.preset]()
    # The first place is attention.
    left_out = len(DROPOUT) if arguments.no_dropout else int(arguments.no_attention_dropout)
    model = config.model.replace(**dict.fromkeys(DROPOUT[:left_out], 0.0))
    config = dataclasses.replace(config, model=model)
    # Before anything else runs in JAX: a CPU is divided into devices once and for all.
    on_cpu = arguments.batch_size or CPU_BATCHES.get(arguments.preset, config.batch_size)
    choose_devices(dataclasses.replace(config, batch_size=on_cpu))
    fitting = GPU_BATCHES if on_gpu() else CPU_BATCHES
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, vocab_size=config.model.vocab_size or vocab_size
        ),
        optimizer=dataclasses.replace(config.optimizer, decay_steps=config.steps),
        batch_size=arguments.batch_size or fitting.get(arguments.preset, config.batch_size),
        dtype=arguments.dtype,
        seed=SEED,
    )  # fmt: skip
    if uses_only_avx2():
        config = dataclasses.replace(config, products="jaxformer")
    return choose_products(config, choose_devices(config))[0]


def random_ids(config: TrainConfig, count: int) -> np.ndarray:
    """Returns token ids, int32 (count,), each as likely as any other."""
    ids = np.random.default_rng(0).integers(0, config.model.vocab_size, count)
    return ids.astype(np.int32)


def training_flops(config: TrainConfig) -> int:
    """Returns the operations of one step in matrix products.

    Those of an evaluation of as many windows are a third.
    """
    from flax import nnx

    from jaxformer.costs import count_training_operations
    from jaxformer.transformer_lm import TransformerLM

    length = config.model.context_length
    model = nnx.eval_shape(lambda: TransformerLM(config.model, rngs=nnx.Rngs(0)))
    return config.batch_size * length * count_training_operations(model, length)


class Jaxformer:
    """Runs jaxformer as ``train.py`` does: calls of up to a second, state donated."""

    def __init__(self, config: TrainConfig, ids: np.ndarray, *, compiles_ahead: bool = False):
        """Draws the parameters; if asked to, it compiles a single step meanwhile, as a run does."""
        from jaxformer.training.initial_state import plan_parameters
        from jaxformer.training.parallel import StepSpec, make_strategy
        from jaxformer.training.parallel.devices import choose_devices
        from jaxformer.training.step_scheduler import SECONDS_PER_CALL

        spec = StepSpec.from_config(config)
        self.parallel = make_strategy(config, spec, choose_devices(config))
        if compiles_ahead:
            self.parallel.compile_ahead(spec.state_shapes(), len(ids), 1)
        self.state = self.parallel.initial_state(plan_parameters(config.model, config.seed))
        self.tokens = self.parallel.place_tokens(ids)
        self.evaluation_batch = self.parallel.evaluation_batch_size
        self._seconds_per_call, self._count = SECONDS_PER_CALL, 1

    def prepare(self, starts: np.ndarray) -> Any:
        """What ``train`` takes, of the windows that begin at ``starts`` (n, B)."""
        return starts

    def train(self, starts: np.ndarray, steps: int | None = None) -> float:
        """Makes n steps, or the first ``steps`` of them, and returns the loss of the last one."""
        made, steps = 0, len(starts) if steps is None else steps
        while made < steps:
            count = min(self._count, steps - made)
            began = time.perf_counter()
            self.state, history = self.parallel.train(
                self.state, self.tokens, np.roll(starts, -made, axis=0), count
            )
            seconds = (time.perf_counter() - began) / count
            self._count = max(1, int(self._seconds_per_call / seconds))
            made += count
        return float(history["train_loss"][-1])

    def compile(self, starts: np.ndarray) -> None:
        """Compiles without a step."""
        self.state, _ = self.parallel.train(self.state, self.tokens, starts, 0)

    def evaluate(self, tokens: Any, windows: tuple[np.ndarray, np.ndarray]) -> float:
        """Mean loss of the windows (starts, mask), in nats per token."""
        batch = self.evaluation_batch
        loss = self.parallel.evaluate(self.state.parameters, tokens, *windows, batch)
        assert loss is not None
        return loss


class TorchRef:
    """Runs torch_ref, eager or under ``torch.compile``, from the same initial weights."""

    def __init__(self, config: TrainConfig, ids: np.ndarray, name: str):
        import torch

        import torch_ref.config
        import torch_ref.train_step
        import torch_ref.transformer_lm
        from jaxformer.porting import export_arrays
        from jaxformer.training.initial_state import draw_parameters

        self.config, self.device = config, torch_device()
        self.tokens = torch.from_numpy(ids).to(self.device)
        model = torch_ref.transformer_lm.TransformerLM(
            torch_ref.config.TransformerLMConfig(**config.model.settings())
        )
        arrays = export_arrays(draw_parameters(config.model, config.seed))
        model.load_state_dict({path: torch.from_numpy(a.copy()) for path, a in arrays.items()})
        model.to(self.device)
        torch.manual_seed(config.seed)
        self.optimizer = torch_ref.config.OptimizerConfig(**dataclasses.asdict(config.optimizer))
        self.state = torch_ref.train_step.TrainState.create(model, self.optimizer)
        casts = name == CAST
        self.dtype = torch.bfloat16 if casts else None
        self.autocasts = config.dtype == "bfloat16" and not casts
        self.evaluation_batch = 64
        self.loss = self._autocast(torch_ref.train_step.language_model_loss)
        self.evaluation = self._autocast(torch_ref.train_step.evaluation_step)
        if name != EAGER:
            limit_torch_compile()
            self.loss, self.evaluation = torch.compile(self.loss), torch.compile(self.evaluation)

    def _autocast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        if not self.autocasts:
            return function

        def automatic(*arguments: Any, **keywords: Any) -> Any:
            with torch.autocast(self.device.type, torch.bfloat16):
                return function(*arguments, **keywords)

        return automatic

    def prepare(self, starts: np.ndarray) -> Any:
        """What ``train`` takes, of the windows that begin at ``starts`` (n, B), on the device."""
        import torch

        offsets = torch.arange(self.config.model.context_length + 1, device=self.device)
        firsts = torch.from_numpy(starts).long().to(self.device)
        windows = self.tokens[firsts[..., None] + offsets].long()
        batches = [(w[None, :, :-1].contiguous(), w[None, :, 1:].contiguous()) for w in windows]
        wait_for_torch()
        return batches

    def train(self, batches: Sequence[Any], steps: int | None = None) -> float:
        """Makes n steps, or the first ``steps`` of them, and returns the loss of the last one."""
        import torch_ref.train_step

        for batch in batches[:steps]:
            _, metrics = torch_ref.train_step.train_step(
                self.state,
                batch,
                optimizer=self.optimizer,
                compute_dtype=self.dtype,
                loss_function=self.loss,
            )
        loss: float = metrics["train_loss"].item()
        return loss

    def compile(self, batches: Sequence[Any]) -> None:
        """One forward and backward pass, which changes nothing but the state of dropout."""
        inputs, targets = batches[0]
        self.loss(self.state.model, inputs[0], targets[0], self.dtype).backward()
        self.state.optimizer_state.zero_grad(set_to_none=True)
        wait_for_torch()

    def evaluate(self, ids: Any, windows: tuple[np.ndarray, np.ndarray]) -> float:
        """Mean loss of the windows (starts, mask), in nats per token."""
        import torch

        batch = self.evaluation_batch
        offsets = np.arange(self.config.model.context_length + 1)
        # Another size of the last batch would be compiled anew.
        padding = -len(windows[0]) % batch
        starts = np.pad(windows[0], (0, padding))
        mask = np.pad(windows[1], ((0, padding), (0, 0)))
        total = torch.zeros((), device=self.device)
        with torch.inference_mode():
            for first in range(0, len(starts), batch):
                cut = ids[starts[first : first + batch, None] + offsets]
                rows = torch.from_numpy(cut).long().to(self.device)
                kept = torch.from_numpy(mask[first : first + batch]).to(self.device)
                total += self.evaluation(
                    self.state.model, rows[:, :-1], rows[:, 1:], kept, compute_dtype=self.dtype
                )
        return total.item() / int(mask.sum())


Side = Jaxformer | TorchRef


def make_side(name: str, config: TrainConfig, ids: np.ndarray) -> Side:
    """Returns a side by its name."""
    return Jaxformer(config, ids) if name == JAXFORMER else TorchRef(config, ids, name)


def speedup(results: Sequence[Mapping[str, Any]], field: str) -> dict[str, float]:
    """Returns how many times as long as jaxformer each side takes, by medians of ``field``.

    Without jaxformer there is nothing to compare.
    """
    medians = {row["side"]: row[field]["median"] for row in results}
    if JAXFORMER not in medians:
        return {}
    candidate = medians.pop(JAXFORMER)
    return {name: rounded(value / candidate) for name, value in medians.items()}
