"""How the arrays of a foreign model and ours correspond: declared once, read in both directions.

A *rule* pairs modules: ours at ``q_proj``, theirs at ``W_q``. Which arrays such a module has, what
each is called on the other side and whether it is transposed follows from the naming rule
(``naming``).

``names`` and ``under`` build rules as the modules nest, and ``*`` stands for a list index:

>>> attention = names(q_proj="W_q", o_proj="W_o")
>>> layers = under("blocks.*", "layers.*", under("attention", "attn", attention))
>>> links, _ = link(layers, {"blocks.3.attention.q_proj.kernel": (2, 5)})
>>> links[0].source, links[0].source_shapes
(('layers.3.attn.W_q.weight',), ((5, 2),))

What a rule cannot say plainly (one array for three projections, one array a head) is its
``Packing``.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxformer.porting.mapping.naming import TORCH_LEAVES

Shape = tuple[int, ...]
# 256 kB of float32: two of them fit into any processor's second-level cache.
TILE = 256


class Packing:
    """How the arrays of one leaf lie in theirs, both with the outputs first: here, one in one."""

    def count(self, target: int) -> int:
        """How many arrays they have for ``ours`` of ours."""
        return target

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """The shapes of theirs, from those of ours."""
        return tuple(shapes)

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Ours as theirs."""
        return list(target)

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Theirs as ours, which have the given shapes."""
        return list(source)


class Fused(Packing):
    """One array of theirs holds ours one after another: GPT-2's c_attn, torch.nn's in_proj."""

    def count(self, target: int) -> int:
        """One."""
        return 1

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """All outputs together."""
        return ((sum(shape[0] for shape in shapes), *shapes[0][1:]),)

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Ours as theirs."""
        return [np.concatenate(target)]

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Theirs as ours."""
        return np.split(source[0], np.cumsum([shape[0] for shape in shapes])[:-1])


@dataclasses.dataclass(frozen=True)
class FusedByHead(Fused):
    """One array holds the first head of each of ours, then the second: GPT-NeoX and BLOOM."""

    num_heads: int

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Ours as theirs."""
        heads = [array.reshape(self.num_heads, -1, *array.shape[1:]) for array in target]
        return [np.stack(heads, axis=1).reshape(-1, *target[0].shape[1:])]

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Theirs as ours."""
        array = source[0]
        heads = array.reshape(self.num_heads, len(shapes), -1, *array.shape[1:])
        return [heads[:, part].reshape(shape) for part, shape in enumerate(shapes)]


@dataclasses.dataclass(frozen=True)
class ArrayPerHead(Packing):
    """They have one array a head, ``#`` in their name, where ours lie side by side."""

    num_heads: int

    def count(self, target: int) -> int:
        """One a head."""
        return self.num_heads

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """A head's share of the outputs."""
        return ((shapes[0][0] // self.num_heads, *shapes[0][1:]),) * self.num_heads

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Ours as theirs."""
        return np.split(target[0], self.num_heads)

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Theirs as ours."""
        return [np.concatenate(source)]


@dataclasses.dataclass(frozen=True)
class RotaryPermutation(Packing):
    """Their rotary embedding turns a head's two halves, ours turns neighbours, or the reverse.

    The first ``width`` outputs of each head are reordered, so that queries and keys on both sides
    are the same vectors in another order, and their products are equal.

    Args:
        head_dim: H.
        width: how much of a head is turned.
    """

    head_dim: int
    width: int

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Neighbours to halves."""
        return [self._reorder(array, (-1, 2), (1, 0)) for array in target]

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Halves to neighbours."""
        return [self._reorder(array, (2, -1), (1, 0)) for array in source]

    def _reorder(self, array: np.ndarray, grid: Shape, axes: Shape) -> np.ndarray:
        order = np.arange(self.head_dim)
        order[: self.width] = order[: self.width].reshape(grid).transpose(axes).reshape(-1)
        heads = array.reshape(-1, self.head_dim, *array.shape[1:])
        return heads[:, order].reshape(array.shape)


ONE_TO_ONE = Packing()


@dataclasses.dataclass(frozen=True)
class Rule:
    """Modules of ours, and theirs that hold the same arrays.

    Attributes:
        target: paths of modules, or of single leaves, ``*`` for an index.
        source: theirs, with the same ``*``; ``#`` for a head's index.
        packing: how several lie in one or one in several.
        transpose: whether their matrices are (out, in), as PyTorch's, and not (in, out).
        joiner: what stands between a module's name and the leaf's.
        scopes: the pairs of modules around them, outermost first.
    """

    target: tuple[str, ...]
    source: tuple[str, ...]
    packing: Packing = ONE_TO_ONE
    transpose: bool = True
    joiner: str = "."
    scopes: tuple[tuple[str, str], ...] = ()

    def within(self, target: str, source: str) -> "Rule":
        """The same rule inside a pair of modules."""
        scopes = tuple((_join(target, a), _join(source, b)) for a, b in self.scopes)
        return dataclasses.replace(
            self,
            target=tuple(_join(target, name) for name in self.target),
            source=tuple(_join(source, name) for name in self.source),
            scopes=((target, source), *scopes),
        )


Rules = tuple[Rule, ...]


def names(pairs: Mapping[str, str] | None = None, /, **more: str) -> Rules:
    """Rules for modules of one array each: ours = theirs."""
    return tuple(Rule((target,), (source,)) for target, source in {**(pairs or {}), **more}.items())


def under(target: str, source: str, rules: Iterable[Rule]) -> Rules:
    """The rules of a pair of modules, seen from the modules around them."""
    return tuple(rule.within(target, source) for rule in rules)


def untransposed(rules: Iterable[Rule]) -> Rules:
    """The same rules where their matrices are (in, out), as in GPT-2's ``Conv1D``."""
    return tuple(dataclasses.replace(rule, transpose=False) for rule in rules)


@dataclasses.dataclass(frozen=True)
class Link:
    """Arrays of ours and the arrays of theirs that hold the same numbers.

    Attributes:
        target: names.
        source: names.
        target_shapes: in the order of ``ours``.
        source_shapes: in the order of ``theirs``.
        rule: where it comes from.
        indices: what its ``*`` stood for.
    """

    target: tuple[str, ...]
    source: tuple[str, ...]
    target_shapes: tuple[Shape, ...]
    source_shapes: tuple[Shape, ...]
    rule: Rule
    indices: tuple[str, ...]

    def to_target(self, source: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Their arrays in our layout; C-contiguous, some may be the arrays that came in."""
        return [contiguous(array) for array in self.view_as_target(source)]

    def view_as_target(self, source: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As ``to_ours``, but not copied where a view will do."""
        flip = self._is_kernel and not self.rule.transpose
        arrays = [array.T for array in source] if flip else source
        arrays = self.rule.packing.unpack(
            arrays, [self._outputs_first(s) for s in self.target_shapes]
        )
        return [array.T if self._is_kernel else array for array in arrays]

    def view_as_source(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Our arrays in their layout, not copied where a view will do."""
        arrays = self.rule.packing.pack([a.T if self._is_kernel else a for a in target])
        flip = self._is_kernel and not self.rule.transpose
        return [array.T if flip else array for array in arrays]

    def describe(self) -> str:
        """What is done to the arrays on the way, in words."""
        packing = type(self.rule.packing).__name__
        steps = (
            [] if self.rule.packing is ONE_TO_ONE else [re.sub("(?<!^)([A-Z])", r" \1", packing)]
        )
        if self._is_kernel and self.rule.transpose:
            steps.append("transpose")
        return " and ".join(steps).lower() or "none"

    @property
    def _is_kernel(self) -> bool:
        return self.target[0].endswith("kernel")

    def _outputs_first(self, shape: Shape) -> Shape:
        return shape[::-1] if self._is_kernel else shape


def link(rules: Iterable[Rule], shapes: Mapping[str, Shape]) -> tuple[list[Link], list[str]]:
    """Finds for each array of ours the arrays of theirs.

    Args:
        rules: at most one may hold for a name.
        shapes: of our arrays, by name.

    Returns:
        The links in the order of our names, and the names of ours that no rule speaks of.
    """
    patterns = [
        (rule, place, _pattern(target))
        for rule in rules
        for place, target in enumerate(rule.target)
    ]
    groups: dict[tuple[Rule, tuple[str, ...], str], dict[int, str]] = {}
    unmatched = []
    for name in shapes:
        found = [
            (rule, match.groups(), place)
            for rule, place, pattern in patterns
            if (match := pattern.fullmatch(name))
        ]
        if not found:
            unmatched.append(name)
        for rule, (*places, leaf), place in found:
            groups.setdefault((rule, tuple(places), leaf), {})[place] = name
    links = []
    for (rule, indices, leaf), by_place in groups.items():
        if len(by_place) < len(rule.target):
            unmatched += by_place.values()
            continue
        target = tuple(by_place[place] for place in range(len(rule.target)))
        links.append(_link(rule, indices, leaf, target, [shapes[name] for name in target]))
    return links, unmatched


def _link(
    rule: Rule, indices: tuple[str, ...], leaf: str, target: tuple[str, ...], shapes: list[Shape]
) -> Link:
    ending = f"{rule.joiner}{TORCH_LEAVES[leaf]}" if leaf else ""
    source = [_fill(name, indices) + ending for name in rule.source]
    if "#" in source[0]:
        source = [source[0].replace("#", str(n)) for n in range(rule.packing.count(1))]
    is_kernel = target[0].endswith("kernel")
    packed = rule.packing.shapes([s[::-1] if is_kernel else s for s in shapes])
    flip = is_kernel and not rule.transpose
    return Link(
        target,
        tuple(name.removeprefix(rule.joiner) for name in source),
        tuple(shapes),
        tuple(shape[::-1] if flip else shape for shape in packed),
        rule,
        indices,
    )


def _pattern(target: str) -> re.Pattern[str]:
    """Matches the leaves of a module's path, or one leaf; its last group is the leaf's kind."""
    inner = re.escape(target).replace(r"\*", r"(\d+)")
    leaves = "|".join(TORCH_LEAVES)
    if target.rpartition(".")[2] in TORCH_LEAVES:
        return re.compile(inner + "()")
    return re.compile(rf"{inner}{re.escape('.') if target else ''}({leaves})")


def _fill(name: str, indices: Sequence[str]) -> str:
    for index in indices:
        name = name.replace("*", index, 1)
    return name


def _join(outer: str, inner: str) -> str:
    return ".".join(part for part in (outer, inner) if part)


def contiguous(array: np.ndarray) -> np.ndarray:
    """The array laid out row by row: itself if it is, else a copy."""
    if array.ndim == 2 and not array.flags.c_contiguous and array.size > TILE**2:
        # numpy walks a transposed matrix in steps of a whole row, each of which misses the cache:
        # tile by tile it takes a third of the time in float32, and a ninth in bfloat16.
        result = np.empty_like(array, order="C")
        for top in range(0, array.shape[0], TILE):
            for left in range(0, array.shape[1], TILE):
                place = np.s_[top : top + TILE, left : left + TILE]
                result[place] = array[place]
        return result
    # ``ascontiguousarray`` would make a 0-d array 1-d.
    return np.array(array, order="C", copy=None)
