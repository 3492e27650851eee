"""What people keep in one file of ``torch.save``: a state dict, and what lies beside it."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxformer.errors import CheckpointError
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.storage.local_files import safe_repr

# Under which keys people save the state dict, the settings, the optimizer and the step; the first
# that is there counts.
STATE_DICTS = ("model", "state_dict", "model_state_dict", "weights")
CONFIGS = ("config", "model_args", "model_config", "hyper_parameters")
OPTIMIZERS = ("optimizer", "optimizer_state_dict")
STEPS = ("step", "iter_num", "global_step", "iteration", "steps", "iter")
# What every optimizer's state has.
OF_OPTIMIZERS = {"state", "param_groups"}


def find_state_dict(tree: Any, path: Path) -> tuple[str | None, dict[str, StoredTensor]]:
    """Returns the key of the state dict, None where it is the whole, and its arrays.

    Raises:
        CheckpointError: there is none.
    """
    if not isinstance(tree, dict):
        what = "one array" if isinstance(tree, StoredTensor) else f"a {type(tree).__name__}"
        raise CheckpointError(f"{path} holds {what}, where a state dict must be")
    place = next((name for name in STATE_DICTS if isinstance(tree.get(name), dict)), None)
    state = tree if place is None else tree[place]
    others = [name for name, value in state.items() if not isinstance(value, StoredTensor)]
    # The own state of a module (``_extra_state``) has no counterpart in JAX.
    if others or not state:
        where = "at its top" if place is None else f"in {place}"
        raise CheckpointError(
            f"{path} holds no state dict {where}: "
            + (
                f"{', '.join(safe_repr(name) for name in others[:5])} are no arrays"
                if others
                else "it is empty"
            )
            + ("" if place else f"; save it alone, or under one of {', '.join(STATE_DICTS)}")
        )
    unnamed = next((name for name in state if not isinstance(name, str)), None)
    if unnamed is not None:
        raise CheckpointError(f"{path} has an array called {safe_repr(unnamed)}, which is no text")
    return place, dict(state)


def find_optimizer(tree: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns the optimizer's state beside a state dict, or why it is not read.

    It is under a key of its own name, or it is the only one under any other key.
    """
    named = next((tree[name] for name in OPTIMIZERS if isinstance(tree.get(name), dict)), None)
    if named is not None:
        return named, ""
    found = {name: states for name, value in tree.items() if (states := _optimizers(value))}
    if sum(map(len, found.values())) > 1:
        return None, f"there are several, in {', '.join(map(safe_repr, found))}"
    return next((states[0] for states in found.values()), None), ""


def _optimizers(value: Any) -> list[Any]:
    several = value if isinstance(value, list | tuple) else [value]
    return [each for each in several if isinstance(each, dict) and each.keys() >= OF_OPTIMIZERS]


def find_record(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is stored beside a state dict, under the keys of a record."""
    record = {
        name: tree[name] for name in ("dialect", "class", "token_ids", "origin") if name in tree
    }
    # nanoGPT's config is that of the training run; its model_args are the model's.
    order = ("model_args", *CONFIGS) if "dialect" not in record else CONFIGS
    config = next((tree[name] for name in order if isinstance(tree.get(name), dict)), None)
    if config is not None:
        record["config"] = {k: v for k, v in config.items() if isinstance(k, str)}
    steps = (_whole_number(tree.get(name)) for name in STEPS)
    step = next((number for number in steps if number is not None), None)
    if step is not None:
        record["step"] = step
    vocabulary = tree.get("vocabulary")
    if isinstance(vocabulary, list | tuple) and all(isinstance(c, str) for c in vocabulary):
        vocabulary = "".join(vocabulary)
    if isinstance(vocabulary, str):
        record["vocabulary"] = vocabulary
    return record


def _whole_number(value: Any) -> int | None:
    """Returns an integer from a number, or an array of one, that is whole; None of all else."""
    if isinstance(value, StoredTensor) and math.prod(value.shape) == 1:
        value = value.read().item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if float(value).is_integer() else None


def find_unread(tree: Mapping[str, Any], place: str, optimizer: Any) -> tuple[str, ...]:
    """Returns the keys whose arrays or settings are not read, such as an average of the weights.

    Args:
        tree: the whole file.
        place: the key of the state dict.
        optimizer: the optimizer's state that is read.
    """
    return tuple(_unread(tree, place, optimizer))


def _unread(tree: Mapping[str, Any], place: str, optimizer: Any) -> Iterator[str]:
    known = {place, *CONFIGS, *STEPS, "token_ids", "vocabulary", "origin"}
    for name, value in tree.items():
        if name in known or not isinstance(value, dict | list | tuple | StoredTensor) or not value:
            continue
        states = _optimizers(value)
        # Of several optimizers it is said why none is read.
        if value is optimizer or (states and (optimizer is None or states[0] is optimizer)):
            continue
        yield name if isinstance(name, str) else safe_repr(name)
