"""The port computes what the PyTorch model does, forward and backward.

    pytest examples/verify_in_ci --parity-html parity

The fixture comes with jaxformer's plugin. A failure names the line of code on both sides, and what
would make it right; ``--parity-html`` writes each comparison as a page.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from model import Classifier, classify


def test_the_port_computes_the_same(jaxformer_parity: Any) -> None:
    """Compares both with every parameter moved away from its first value."""
    torch.manual_seed(0)
    reference = Classifier()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    params = {name: array.numpy() for name, array in reference.state_dict().items()}
    x = np.random.default_rng(0).normal(size=(5, 6))
    jaxformer_parity(reference, (classify, params), x)
