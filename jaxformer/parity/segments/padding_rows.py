"""Gradients of padding tokens, whose rows of an embedding PyTorch does not train."""

from collections.abc import Mapping

import numpy as np

from jaxformer.parity.recording.operators.tape import Tape


def without_row(gradient: np.ndarray, row: int) -> np.ndarray:
    """Returns the gradient of an embedding with zeros in one row."""
    made = gradient.copy()
    made[row] = 0
    return made


def describe_padding_rows(tape: Tape, rows: Mapping[str, int]) -> str:
    """Returns which padding tokens the candidate trains and the reference does not, "" if none.

    Args:
        tape: of the reference, after its backward pass.
        rows: of embeddings whose padding row has a gradient in the candidate, by parameter.
    """
    made = [op.outputs[0] for op in tape.operators if op.name == "embedding_dense_backward"]
    read = [
        f"{name} (row {row})"
        for name, row in rows.items()
        # The head of a tied embedding trains the row on both sides.
        if any(g.shape == tape.parameters[name].shape and g.data[row].any() for g in made)
    ]
    if not read:
        return ""
    return f"the reference gives padding tokens no gradient, the candidate does: {', '.join(read)}"
