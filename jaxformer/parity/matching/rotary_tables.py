"""Rotary tables of both sides: compared by themselves, then shared, so they stand in no other way.

Cosines and sines are float32 functions of position · frequency, and libraries' powers differ in the
last bit: at position 5000 that is 3e-4 of the table. It would look like a bug of every attention.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx

from jaxformer.parameters import join_path
from jaxformer.parity.report.model import Difference, Node
from jaxformer.parity.trace import torch_trace as torch_trace
from jaxformer.porting.mapping.tables import Table
from jaxformer.positions import Rotary

Tables = tuple[np.ndarray, np.ndarray]


def share_tables(
    module: Any, torch_module: Any, reference: torch_trace.Trace, *, wrong: bool = True
) -> list[Node]:
    """Gives our rotary positions their tables, where theirs are made by a module of its own.

    An angle is right to a few units in the last place of float32, so an entry may be off by
    2^-22 · (1 + position).

    Args:
        module: ours, whose rotary positions are changed.
        torch_module: theirs.
        reference: a pass of it, with positions 0 … T - 1.
        wrong: whether also to share those of which ours are wrong, so that nothing else is.

    Returns:
        A node for each rotary position whose table is another, or for the first where none is.
    """
    found = reference_tables(torch_module, reference)
    if found is None:
        return []
    reference_path, tables = found
    nodes = []
    for path, node in nnx.iter_modules(module):
        if not isinstance(node, Rotary):
            continue
        difference = table_difference(node.tables(), tables)
        named = join_path(path)
        if difference is None:
            message = f"it turns {node.width} dimensions, theirs {2 * tables[0].shape[1]}"
            difference = Difference(float("inf"), 1.0, 0.0)
        else:
            message = "its angles differ: look at the base, the scaling, the share that is turned"
            # A table that is wrong is no reason for its attention to be.
            if wrong or not difference.is_bug:
                give_tables(node, tables)
        nodes.append(
            Node(
                named, reference_path, "Rotary",
                type(torch_module.get_submodule(reference_path)).__name__,
                depth=named.count("."), order=reference.calls[reference_path].order,
                forward=difference, message=message,
            )
        )  # fmt: skip
    bugs = [node for node in nodes if node.forward is not None and node.forward.is_bug]
    return bugs or nodes[:1]


def share_tables_of_length(
    module: Any, torch_module: Any, call: Callable[[Any, Any], Any], length: int
) -> list[Node]:
    """``share_tables`` after a pass of theirs over ``length`` tokens; wrong ones stay as they are.

    Args:
        module: ours, whose rotary positions are changed.
        torch_module: theirs, in float64.
        call: how theirs is called with ids.
        length: T.
    """
    torch = torch_trace.require_torch()
    seen = torch_trace.run(
        torch_module,
        [torch.zeros((1, length), dtype=torch.int64)],
        call=lambda m, given: call(m, given[0]),
        keep=lambda path: "Rotary" in type(torch_module.get_submodule(path)).__name__,
    )
    return share_tables(module, torch_module, seen, wrong=False)


def reference_tables(torch_module: Any, reference: torch_trace.Trace) -> tuple[str, Tables] | None:
    """Their cosines and sines (T, width / 2), and the module that made them."""
    modules = torch_trace.modules_of(torch_module)
    for path, call in reference.calls.items():
        if "Rotary" not in type(modules[path]).__name__:
            continue
        if len(call.outputs) == 2 and call.outputs[0].shape == call.outputs[1].shape:
            cos, sin = (a.reshape(-1, *a.shape[-2:])[0] for a in call.outputs)
            half = cos.shape[-1] // 2
            if np.array_equal(cos[:, :half], cos[:, half:]):
                cos, sin = cos[:, :half], sin[:, :half]
            return path, (cos, sin)
    return None


def give_tables(node: Rotary, tables: Tables) -> None:
    """Makes a rotary position of ours use these."""
    node.cos, node.sin = (Table(_padded(table, node.max_length)) for table in tables)


def table_difference(candidate: Tables, reference: Tables) -> Difference | None:
    """The worst entry, judged at its position; None where the shapes do not fit."""
    length = reference[0].shape[0]
    if any(
        a.shape[0] < length or a.shape[1:] != b.shape[1:]
        for a, b in zip(candidate, reference, strict=True)
    ):
        return None
    error = np.max(
        [np.abs(a[:length] - b) for a, b in zip(candidate, reference, strict=True)], axis=(0, 2)
    )
    allowed = 2.0**-22 * (1 + np.arange(length))
    worst = int(np.argmax(error / allowed))
    return Difference(float(error[worst]), 1.0, float(allowed[worst]))


def _padded(table: np.ndarray, length: int) -> np.ndarray:
    """The table with zeros for positions that the pass did not reach."""
    padded = np.zeros((max(length, len(table)), table.shape[1]))
    padded[: len(table)] = table
    return padded
