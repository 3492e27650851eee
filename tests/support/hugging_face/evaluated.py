"""A model that is run once: its jaxpr is evaluated in numpy, and no program is compiled for it."""

from typing import Any

import numpy as np
from flax import nnx

from jaxformer.parity.recording.operators.evaluation import evaluate_function
from tests.support.hugging_face.running import run_target


def evaluate_target(target: Any, ids: np.ndarray) -> list[Any]:
    """What ``run_target`` gives. Where settings are tested, it takes two thirds of the time."""
    definition, state = nnx.split(target)
    return evaluate_function(lambda state: run_target(nnx.merge(definition, state), ids), state)
