"""Numbers that are not finite: how they are found in a state, and how they end a run."""

import json
import math
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxformer.checkpoints import Arrays
from jaxformer.errors import DivergedError
from jaxformer.hardware.invocation import command
from jaxformer.storage.durable_files import atomic_write_text
from jaxformer.training.run_folder import RunFolder


def report_divergence(
    folder: RunFolder, step: int, subject: str, facts: dict[str, Any]
) -> NoReturn:
    """Writes ``divergence-<step>.json`` and ends the run.

    Args:
        folder: of the run.
        step: which one diverged.
        subject: what is not finite, in words.
        facts: the numbers of the step, by name.

    Raises:
        DivergedError: always.
    """
    path = folder.path / f"divergence-{step}.json"
    shown = {name: repr(v) if _is_not_finite(v) else v for name, v in facts.items()}
    atomic_write_text(path, json.dumps({"step": step, **shown}, indent=1))
    numbers = ", ".join(
        f"{name} {facts[name]:.4g}"
        for name in ("train_loss", "val_loss", "grad_norm", "learning_rate")
        if name in facts
    )
    folder.checkpoints.settle()
    raise DivergedError(
        f"{subject} is not finite{f' ({numbers})' if numbers else ''}, more in {path}; "
        + folder.checkpoints.last_saved()
        + f": {command('train', '--resume', '--out', folder.path)} with a smaller --learning-rate"
    )


@jax.jit
def all_finite(state: Any) -> Bool[Array, ""]:
    """Returns whether every number of a placed state is finite, in one call on its devices."""
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()


def not_finite(arrays: Arrays) -> list[str]:
    """Returns the names of the arrays in which a number is not finite.

    Arrays on devices are checked there; of several processes all call this together.
    """
    named = {
        f"{group}/{name}": array
        for group, members in arrays.items()
        if isinstance(members, dict)
        for name, array in members.items()
    }
    placed = {name: array for name, array in named.items() if isinstance(array, jax.Array)}
    finite = {name: bool(value) for name, value in _are_finite(placed).items()} if placed else {}
    for name in named.keys() - placed.keys():
        finite[name] = bool(np.isfinite(named[name]).all())
    return [name for name in named if not finite[name]]


@jax.jit
def _are_finite(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: jnp.isfinite(array).all() for name, array in arrays.items()}


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
