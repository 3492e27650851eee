"""``Linear``, ``Embedding`` and ``Dropout``: PyTorch's own, with the project's keywords."""

import zlib

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Linear(nn.Linear):
    """Computes y = x Wᵀ + b, with ``weight`` W (out_features, in_features) and ``bias`` b.

    >>> tuple(Linear(3, 5)(torch.ones(2, 7, 3)).shape)
    (2, 7, 5)
    """

    def __init__(self, in_features: int, out_features: int, *, use_bias: bool = True):
        super().__init__(in_features, out_features, bias=use_bias)


class Embedding(nn.Embedding):
    """Looks up rows of a table, ``weight`` (num_embeddings, features), by id.

    Rows start as standard normals. An id outside [0, num_embeddings) is an IndexError on the CPU
    and stops the process on a GPU, so callers check on the host.
    """

    def __init__(self, num_embeddings: int, features: int):
        super().__init__(num_embeddings, features)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product of x (…, D) with every row (…, V): a tied output head."""
        return functional.linear(x, self.weight)


class Dropout(nn.Module):
    """Drops elements while training: x · keep / (1 - rate), each kept with probability 1 - rate.

    The mask is ``keep_mask`` where a test has put one there (boolean, True = keep), else drawn
    from the ``generator`` that ``seed_dropout`` gave it, else from torch's global one. Neither is
    part of the state dict.

    Raises:
        ValueError: the rate is not in [0, 1).
    """

    def __init__(self, rate: float):
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"the rate of dropout must be in [0, 1): got {rate}")
        self.rate = rate
        self.generator: torch.Generator | None = None
        self.keep_mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x``, of any shape, with elements dropped while training."""
        if not self.training or self.rate == 0:
            return x
        if self.keep_mask is not None:
            keep = self.keep_mask
        elif self.generator is not None:
            keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
            keep.bernoulli_(1 - self.rate, generator=self.generator)
        else:
            return functional.dropout(x, self.rate)
        return torch.where(keep, x / (1 - self.rate), 0)

    def extra_repr(self) -> str:
        """Returns what ``print(module)`` shows of it."""
        return f"rate={self.rate}"


def dropout_modules(module: nn.Module) -> dict[str, Dropout]:
    """Returns every ``Dropout`` of ``module`` by path: ``blocks.3.attention.attention_dropout``."""
    return {path: node for path, node in module.named_modules() if isinstance(node, Dropout)}


def seed_dropout(module: nn.Module, seed: int | None) -> None:
    """Gives every ``Dropout`` its own generator, seeded by ``seed`` and its path only.

    The generators live where the parameters are, and advance from call to call. None takes them
    away again.

    Raises:
        ValueError: the seed is negative.
    """
    if seed is not None and seed < 0:
        raise ValueError(f"seed must not be negative: got {seed}")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    for path, dropout in dropout_modules(module).items():
        if seed is None:
            dropout.generator = None
            continue
        # The CPU's generator reads only the lower 32 bits of its seed, so the two are mixed.
        mixed = np.random.SeedSequence((seed, zlib.crc32(path.encode()))).generate_state(1)
        dropout.generator = torch.Generator(device).manual_seed(int(mixed[0]))


def inject_keep_masks(module: nn.Module, masks: dict[str, torch.Tensor]) -> None:
    """Fixes the masks (True = keep) of the named places, so two frameworks drop the same units.

    A place that is not named loses the mask it had.

    Raises:
        ValueError: a path is not a place of dropout in ``module``.
    """
    places = dropout_modules(module)
    if unknown := sorted(set(masks) - set(places)):
        raise ValueError(f"no dropout at {', '.join(unknown)}; there is {', '.join(places)}")
    for path, dropout in places.items():
        dropout.keep_mask = masks.get(path)
