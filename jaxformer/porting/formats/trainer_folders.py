"""What transformers' Trainer keeps beside the weights: ``optimizer.pt``, and the step it stands at.

Its groups do not name their parameters: ``mapping/optimizer_groups`` knows how it makes them.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxformer.errors import CheckpointError
from jaxformer.porting.formats.torch_entries import OF_OPTIMIZERS
from jaxformer.porting.formats.torch_files import read_torch_file
from jaxformer.porting.formats.torch_writer import write_torch_file
from jaxformer.storage.durable_files import atomic_write_bytes

# The second is the name that accelerate gives.
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
SCHEDULER = "scheduler.pt"
STATE = "trainer_state.json"
# What has no counterpart: a schedule is a function of the step, and so are random numbers.
UNREAD = (
    SCHEDULER, "scaler.pt", "rng_state.pth", "scheduler.bin", "sampler.bin", "random_states_0.pkl",
)  # fmt: skip
# What the Trainer takes from its state in place of its arguments, and its own defaults. The batch
# size must be there; it is taken with ``auto_find_batch_size`` alone.
TAKEN = {"save_steps": 500, "logging_steps": 500, "eval_steps": 500, "train_batch_size": 1}
# What else the Trainer asks of its state beside the step.
REQUIRED = {
    "log_history": [],
    "stateful_callbacks": {
        "TrainerControl": {
            "args": {
                "should_training_stop": False,
                "should_epoch_stop": False,
                "should_save": False,
                "should_evaluate": False,
                "should_log": False,
            },
            "attributes": {},
        }
    },
}


@dataclasses.dataclass(frozen=True)
class OptimizerFile:
    """An optimizer's state in a file of its own, which is read when it is needed."""

    path: Path

    @property
    def files(self) -> tuple[Path, ...]:
        """The file, and that of the Trainer's own state where it lies beside it."""
        state = self.path.parent / STATE
        return (self.path, state) if state.is_file() else (self.path,)

    def steps(self) -> int | None:
        """Returns how many steps the Trainer has made, None if nothing readable tells."""
        found = self._state().get("global_step")
        return found if type(found) is int else None

    def settings(self) -> dict[str, int]:
        """Returns which of ``TAKEN`` the Trainer's state tells."""
        return known_settings(self._state())

    def _state(self) -> dict[str, Any]:
        """Returns the Trainer's own state, nothing if it is not readable."""
        try:
            # Its losses may be NaN, which is no JSON.
            state = json.loads(self.files[1].read_bytes())
        except (IndexError, ValueError, RecursionError, OSError):
            return {}
        return state if isinstance(state, dict) else {}

    def read(self) -> dict[str, Any]:
        """Returns the optimizer's state dict; its arrays are read later.

        Raises:
            CheckpointError: the file is damaged, or holds something else.
            UnsafeFileError: opening it could do harm.
            ResourceError: it cannot be read.
        """
        tree = read_torch_file(self.path)
        if not isinstance(tree, dict) or not tree.keys() >= OF_OPTIMIZERS:
            raise CheckpointError(f"{self.path} holds no optimizer's state")
        return tree


def find_optimizer_file(folder: Path) -> OptimizerFile | None:
    """Returns the optimizer's state beside the weights of a folder, None if there is none."""
    found = [folder / name for name in OPTIMIZERS if (folder / name).is_file()]
    return OptimizerFile(found[0]) if found else None


def known_settings(state: Any) -> dict[str, int]:
    """Returns which of ``TAKEN`` are in what somebody else may have written."""
    known = state if isinstance(state, Mapping) else {}
    found = {name: known.get(name) for name in TAKEN}
    return {n: value for n, value in found.items() if type(value) is int and value > 0}


def unread_files(folder: Path) -> tuple[str, ...]:
    """Returns the names of the files in a folder which the Trainer would read, and nobody here."""
    return tuple(name for name in UNREAD if (folder / name).is_file())


def write_trainer_files(
    folder: Path,
    optimizer: Mapping[str, Any],
    step: int,
    settings: Mapping[str, int],
    progress: Callable[[int], None],
) -> None:
    """Writes what the Trainer reads beside the weights, to go on from a step.

    Its schedule goes on at that step, with the learning rate of its own arguments.

    Args:
        folder: it has the weights already.
        optimizer: the optimizer's state dict.
        step: how many steps it has made.
        settings: all of ``TAKEN``.
        progress: called after each array with its size in bytes.

    Raises:
        ResourceError: it cannot be written.
    """
    write_torch_file(folder / OPTIMIZERS[0], optimizer, progress)
    scheduler = {
        "last_epoch": step,
        "_step_count": step + 1,
        "lr_lambdas": [None for _ in optimizer["param_groups"]],
    }
    write_torch_file(folder / SCHEDULER, scheduler)
    state = {"global_step": step, **settings, **REQUIRED}
    text = json.dumps(state, indent=2) + "\n"
    atomic_write_bytes(folder / STATE, text.encode())
