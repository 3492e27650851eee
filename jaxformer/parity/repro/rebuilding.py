"""Finds out whether the models of a repro can be built again from their settings."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.errors import JaxformerError, UsageError
from jaxformer.parity.matching.pairs import Pair
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.repro.modules import (
    build_candidate,
    build_reference,
    load_state,
    run_reference,
)
from jaxformer.parity.tolerance import judge
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG, architecture_of


def reference_recipe(
    module: Any,
    pair: Pair,
    calls: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Returns how the reference is built, after building its modules and running them.

    If that fails, the class is empty and ``why`` is the reason.

    Args:
        module: the whole reference.
        pair: its modules are built.
        calls: of each reference module, encoded.
        arrays: what the folder will hold.
    """
    home = type(module).__module__.partition(".")[0]
    kind = type(module).__name__
    config = getattr(module, "config", None)
    unknown = {"library": "", "class": "", "config": {}, "why": "its class is not known here"}
    if config is None or home not in ("transformers", "torch_ref"):
        return unknown
    settings = config.to_dict() if home == "transformers" else config.settings()
    found = {"library": home, "class": kind, "config": json.loads(json.dumps(settings))}
    try:
        whole = build_reference(home, kind, found["config"])
        for place, (path, call) in enumerate(zip(pair.reference, calls, strict=True)):
            rebuilt = whole.get_submodule(path)
            state = _inside(arrays, f"reference/{place}/state/")
            load_state(rebuilt, {name: StoredTensor.of(array) for name, array in state.items()})
            given = _inside(arrays, f"reference/{place}/arguments/")
            output = run_reference(rebuilt, call, given, backward=False).outputs[0]
            if judge(output, arrays[f"reference/{place}/output/0"]).is_bug:
                raise UsageError("it was changed after it was built")
    except (JaxformerError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        return {**unknown, "why": str(error).splitlines()[0].replace('"', "'")}
    return found


def candidate_recipe(module: Any, pair: Pair) -> dict[str, Any]:
    """Returns how the candidate is built; see ``reference_recipe``.

    Instead of running the modules, their settings are compared.
    """
    config = getattr(module, "config", None)
    unknown = {"class": "", "config": {}, "why": "its settings are not known here"}
    if config is None or type(config) not in MODEL_OF_CONFIG:
        return unknown
    kind = type(module).__name__
    settings = json.loads(json.dumps(config.settings()))
    for path in pair.candidate:
        original = jax_modules.resolve(module, path)[0]
        rebuilt = jax_modules.resolve(build_candidate(kind, settings), path)[0]
        if architecture_of(original) != architecture_of(rebuilt):
            return {**unknown, "why": "it was changed after it was built"}
    return {"class": kind, "config": settings}


def _inside(arrays: Mapping[str, np.ndarray], start: str) -> dict[str, np.ndarray]:
    return {n.removeprefix(start): array for n, array in arrays.items() if n.startswith(start)}
