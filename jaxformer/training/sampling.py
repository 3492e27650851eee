"""``jaxformer sample``: text from a trained model."""

import math
import sys
from pathlib import Path
from typing import Any

from jaxformer.errors import CheckpointError, UsageError


def check(options: Any) -> None:
    """Checks the ranges of the command's settings, before JAX is imported.

    Raises:
        ValueError: one of them is out of its range; the message names it.
    """
    if not (math.isfinite(options.temperature) and options.temperature > 0):
        raise ValueError(f"--temperature must be positive and finite: got {options.temperature}")
    for name in ("tokens", "samples", "top_k"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1: got {value}")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ValueError(f"--top-p must be in (0, 1]: got {options.top_p}")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed must be in [0, 2^63): got {options.seed}")
    if options.step is not None and options.best:
        raise ValueError("--step and --best exclude each other")


def sample(
    path: Path,
    *,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    greedy: bool,
    samples: int,
    step: int | None,
    best: bool,
    unknown: Any,
) -> None:
    """Writes texts to standard output as they are made, each begun by the prompt.

    Args:
        path: a run's folder.
        prompt: what a text begins with; where it is empty, a new line that is not shown.
        tokens: how many characters to write after it.
        temperature: see ``logits.filter_logits``.
        top_k: see ``logits.filter_logits``.
        top_p: see ``logits.filter_logits``.
        seed: text n is drawn from seed + n.
        greedy: take the most probable character.
        samples: how many texts.
        step: of the checkpoint; default the newest that verifies.
        best: the checkpoint with the lowest validation loss.
        unknown: see ``CharTokenizer.encode``.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        TextError: the prompt holds a character that the model does not know.
    """
    from jaxformer.char_data import CharTokenizer

    arrays, manifest = load_checkpoint(path, step, best)
    tokenizer = CharTokenizer(manifest["vocabulary"])
    ids = tokenizer.encode(prompt, unknown=unknown)
    if not len(ids):
        ids = tokenizer.encode("\n", unknown="replace")
        prompt = ""

    import jax

    from jaxformer.generation import stream

    model = build_model(arrays, manifest)
    for n in range(samples):
        if samples > 1:
            _write(("\n\n" if n else "") + f"--- {n + 1} of {samples} ---\n")
        _write(prompt)
        chunks = stream(
            model,
            ids[None],
            tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            greedy=greedy,
            key=jax.random.key(seed + n),
        )
        for chunk in chunks:
            _write(tokenizer.decode(i for i in chunk[0] if i < tokenizer.vocabulary_size()))
    _write("\n")


def load_checkpoint(path: Path, step: int | None, best: bool) -> tuple[Any, dict[str, Any]]:
    """The arrays and the manifest of a run's checkpoint.

    Args:
        path: the run's folder.
        step: of the checkpoint; default the newest that verifies.
        best: the checkpoint with the lowest validation loss.

    Raises:
        UsageError: the path is not a folder.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    from jaxformer.training.checkpoints import CheckpointFolder

    if not path.is_dir():
        raise (CheckpointError if not path.exists() else UsageError)(
            f"{path} " + ("is not a run's folder" if path.exists() else "does not exist")
        )
    folder = CheckpointFolder(path / "checkpoints")
    steps = folder.steps()
    if not steps:
        raise CheckpointError(f"{path} holds no checkpoint: train one with train.py --out {path}")
    if step is not None and step not in steps:
        raise CheckpointError(f"{path} has no step {step}: it has {', '.join(map(str, steps))}")
    if best:
        step = folder.best_step()
        if step is None:
            raise CheckpointError(
                f"{path} has no checkpoint with a validation loss: leave out --best"
            )
    if step is not None:
        return folder.restore(step)
    arrays, manifest, warnings = folder.restore_latest(quarantine=False)
    for warning in warnings:
        print(f"jaxformer: warning: {warning}", file=sys.stderr)
    return arrays, manifest


def build_model(arrays: Any, manifest: dict[str, Any]) -> Any:
    """The ``TransformerLM`` of a checkpoint, in training mode as every fresh module.

    Raises:
        CheckpointError: names or shapes of the arrays are not the model's.
    """
    import jax

    from jaxformer.parameters import merge
    from jaxformer.training.config import TrainConfig
    from jaxformer.training.experiment import check_arrays

    definition = check_arrays(arrays, TrainConfig.from_dict(manifest["config"]).model)
    return merge(definition, jax.tree.map(jax.numpy.asarray, arrays["parameters"]))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
