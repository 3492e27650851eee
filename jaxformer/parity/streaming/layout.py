"""Which modules are blocks, and which arrays around them are too large to be held whole."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flax import nnx

from jaxformer.blocks import Block
from jaxformer.config import TransformerLMConfig
from jaxformer.errors import UsageError
from jaxformer.layers import Embedding, Linear
from jaxformer.parameters import join_path
from jaxformer.parity.matching.pairs import (
    TIED_HEAD,
    Pair,
    PairKey,
    depths_of,
    pair_modules,
    parents_of,
)
from jaxformer.parity.matching.positions import computes_tables
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.recording.torch_values import require_torch
from jaxformer.porting.mapping.abstract_modules import parameter_shapes
from jaxformer.porting.mapping.packings import ONE_TO_ONE
from jaxformer.porting.mapping.plans import Plan

# Numbers of an array around the blocks that is not held whole in float64: half a gigabyte.
WIDE = 1 << 26
# Blocks that a message lists.
MOST_NAMES = 4


class CannotStreamError(UsageError):
    """A comparison cannot be made block by block; the message says why."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parts of two models.

    Attributes:
        pairs: all pairs of modules.
        parents: the pair around each pair.
        units: the blocks, by path in the candidate, in order.
        others: blocks without a counterpart, which are held whole, as what is around the blocks:
            T5's first ones, as they make the positions of the others.
        lookups: large embeddings, of which only the rows that are read are held.
        heads: large products with the vocabulary, which are computed in slices.
        recorded: paths of the reference's modules whose calls are recorded.
    """

    pairs: tuple[Pair, ...]
    parents: Mapping[PairKey, PairKey | None]
    units: Mapping[str, Pair]
    others: tuple[str, ...]
    lookups: Mapping[str, Pair]
    heads: Mapping[str, Pair]
    recorded: frozenset[str]

    @functools.cached_property
    def depths(self) -> dict[PairKey, int]:
        """How many pairs are around each pair."""
        return depths_of(self.pairs, self.parents)

    @functools.cached_property
    def unit_references(self) -> dict[str, str]:
        """The blocks' paths in the candidate, by those in the reference."""
        return {pair.reference[0]: path for path, pair in self.units.items()}

    def pairs_of(self, path: str) -> list[Pair]:
        """Returns the pairs within a block, its own included."""
        return [pair for pair in self.pairs if is_within(pair.candidate[0], path)]

    def outer_pairs(self) -> list[Pair]:
        """Returns the pairs around the blocks, and those of the blocks themselves."""
        return [pair for pair in self.pairs if not self.is_inner(pair.candidate[0])]

    def is_inner(self, path: str) -> bool:
        """Whether a path of the candidate lies inside a block."""
        return path not in self.units and any(is_within(path, unit) for unit in self.units)

    def inner_parents(self, pairs: Iterable[Pair]) -> dict[PairKey, PairKey | None]:
        """Returns the pair around each of these pairs, as far as it is one of them."""
        known = {pair.candidate for pair in pairs}
        return {key: p if (p := self.parents[key]) in known else None for key in known}


def is_within(path: str, outer: str) -> bool:
    """Whether a path is that of a module, or inside it."""
    return path == outer or path.startswith(f"{outer}.")


def find_layout(plan: Plan, candidate: Any, modules: Mapping[str, Any]) -> Layout:
    """Finds the parts of two models.

    Args:
        plan: how the reference is ported.
        candidate: the JAX model, with shapes in place of weights.
        modules: of the reference, by path.

    Raises:
        CannotStreamError: no more than half of the blocks are in a pair of their own, or the
            reference has tables in them.
    """
    pairs = pair_modules(candidate, plan.module_mapping, plan.links, modules)
    by_path = {pair.candidate[0]: pair for pair in pairs if len(pair.candidate) == 1}
    units, others = {}, []
    for path, node in nnx.iter_modules(candidate):
        if isinstance(node, Block):
            pair = by_path.get(join_path(path))
            if pair is None or not pair.can_run_isolated or len(pair.reference) > 1:
                others.append(join_path(path))
            else:
                units[join_path(path)] = pair
    if others and len(units) <= len(others):
        raise CannotStreamError(
            f"no modules of the reference are paired with {', '.join(others[:MOST_NAMES])}"
        )
    inside = tuple(pair.reference[0] for pair in units.values())
    tables = {
        path
        for path, module in modules.items()
        # torch_ref's are never called: attentions ask them to rotate.
        if computes_tables(module) and not type(module).__module__.startswith("torch_ref.")
    }
    if any(is_within(path, outer) for path in tables for outer in inside):
        raise CannotStreamError("each block of the reference has tables of positions of its own")
    lookups, heads = _find_wide(candidate, by_path, modules)
    return Layout(
        tuple(pairs),
        parents_of(pairs),
        units,
        tuple(others),
        lookups,
        heads,
        frozenset(tables | {path for pair in pairs for path in pair.reference}),
    )


def _find_wide(
    candidate: Any, pairs: Mapping[str, Pair], modules: Mapping[str, Any]
) -> tuple[dict[str, Pair], dict[str, Pair]]:
    """Returns large embeddings and large products with the vocabulary, around the blocks."""
    torch = require_torch()
    shapes = parameter_shapes(candidate)
    lookups: dict[str, Pair] = {}
    heads: dict[str, Pair] = {}
    for path, pair in pairs.items():
        owner, method = jax_modules.resolve(candidate, path) if path else (None, "")
        if not isinstance(owner, Embedding | Linear) or pair.packing is not ONE_TO_ONE:
            continue
        name = path.removesuffix(".attend")
        leaf = "embedding" if isinstance(owner, Embedding) else "kernel"
        is_outside = not any(isinstance(node, Block) for node in _around(candidate, path))
        if math.prod(shapes[f"{name}.{leaf}"]) <= WIDE or not is_outside:
            continue
        reference = modules[pair.reference[0]]
        if isinstance(owner, Embedding) and method == "__call__":
            if isinstance(reference, torch.nn.Embedding):
                lookups[path] = pair
        elif pair.can_run_isolated and isinstance(reference, torch.nn.Linear | torch.nn.Embedding):
            heads[path] = pair
    config = candidate.config
    if not isinstance(config, TransformerLMConfig) or (
        config.head.tie_embeddings and TIED_HEAD not in heads
    ):
        # All rows are read by a head that is not computed in slices.
        lookups = {}
    return lookups, heads


def _around(candidate: Any, path: str) -> Iterator[Any]:
    """Yields the modules around a path."""
    parts = path.split(".")
    for n in range(1, len(parts)):
        yield jax_modules.resolve(candidate, ".".join(parts[:n]))[0]
