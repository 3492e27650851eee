"""Embeddings that a model has several times, with one array."""

import copy
from collections.abc import Mapping
from typing import Any

from jaxformer.parity.recording.torch_values import require_torch


def join_twins(module: Any, aliases: Mapping[str, str]) -> Any:
    """Returns a model that calls one embedding where it called several with the same array.

    A candidate has it once. transformers 5 gives both stacks of a T5 an embedding of their own
    beside the shared one, which nothing calls.

    Args:
        module: a PyTorch model; it is not changed.
        aliases: second names of parameters, by their first names.

    Returns:
        a copy with the same arrays; the model itself if it has no such embeddings.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    pairs = [(a.rpartition(".")[0], name.rpartition(".")[0]) for a, name in aliases.items()]
    twins = [
        (twin, path)
        for twin, path in pairs
        if twin in modules and path in modules and _is_twin(modules[twin], modules[path])
    ]
    if not twins:
        return module
    arrays = [*module.parameters(), *module.buffers()]
    joined = copy.deepcopy(module, {id(array): array for array in arrays})
    for twin, path in twins:
        owner, _, leaf = twin.rpartition(".")
        setattr(joined.get_submodule(owner), leaf, joined.get_submodule(path))
    return joined


def _is_twin(one: Any, other: Any) -> bool:
    """Returns whether two modules are embeddings that do the same with the same array."""
    if one is other or not type(one) is type(other) is require_torch().nn.Embedding:
        return False
    has_hooks = any(m._forward_hooks or m._forward_pre_hooks for m in (one, other))
    return one.weight is other.weight and one.extra_repr() == other.extra_repr() and not has_hooks
