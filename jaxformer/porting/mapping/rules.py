"""Which arrays of two code bases are the same: rules declared once, read in both directions.

Everywhere in porting, *target* means the jaxformer side (paths, leaves, shapes and arrays) and
*source* means the other code base's. That stays so on export, which applies the same rules from
target to source.

A ``Rule`` pairs modules: the target ``q_proj``, the source ``W_q``. Which arrays such a module has,
what each is called in the source and whether it is transposed follows from the naming rule
(``naming``). ``link`` applies rules to the arrays of one model; each ``Link`` pairs arrays.

``names`` and ``under`` build rules as the modules nest, and ``*`` stands for a list index:

>>> attention = names(q_proj="W_q", o_proj="W_o")
>>> layers = under("blocks.*", "layers.*", under("attention", "attn", attention))
>>> links, _ = link(layers, {"blocks.3.attention.q_proj.kernel": (2, 5)})
>>> links[0].source, links[0].source_shapes
(('layers.3.attn.W_q.weight',), ((5, 2),))

Where the numbers of arrays differ (one array for three projections, one array a head) a rule has
a ``Packing``.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxformer.porting.mapping.naming import TORCH_LEAVES, turned, turned_shape
from jaxformer.porting.mapping.packings import ONE_TO_ONE, Packing, Shape

# 256 kB of float32: two of them fit into any processor's second-level cache.
TILE = 256


@dataclasses.dataclass(frozen=True)
class Rule:
    """Target modules and the source modules that hold the same arrays.

    Attributes:
        target: paths of jaxformer modules, or of single leaves; ``*`` is a list index.
        source: names of the other code base, with the same ``*``; ``#`` is the index of a head.
        packing: how the target arrays lie in the source arrays.
        transpose: whether source matrices are (out, in), as PyTorch's are, and not (in, out).
        joiner: the text between a source module's name and its leaf's.
        is_buffer: whether the source arrays are buffers there, which no optimizer moves.
        scopes: the pairs (target, source) of modules around them, outermost first.
    """

    target: tuple[str, ...]
    source: tuple[str, ...]
    packing: Packing = ONE_TO_ONE
    transpose: bool = True
    joiner: str = "."
    is_buffer: bool = False
    scopes: tuple[tuple[str, str], ...] = ()

    def within(self, target: str, source: str) -> "Rule":
        """Returns the same rule inside a pair of modules."""
        scopes = tuple((_join(target, a), _join(source, b)) for a, b in self.scopes)
        return dataclasses.replace(
            self,
            target=tuple(_join(target, name) for name in self.target),
            source=tuple(_join(source, name) for name in self.source),
            scopes=((target, source), *scopes),
        )


Rules = tuple[Rule, ...]


def names(pairs: Mapping[str, str] | None = None, /, **more: str) -> Rules:
    """Returns rules that only rename modules: target = source."""
    return tuple(Rule((target,), (source,)) for target, source in {**(pairs or {}), **more}.items())


def under(target: str, source: str, rules: Iterable[Rule]) -> Rules:
    """Returns the rules of a pair of modules as seen from the modules around them."""
    return tuple(rule.within(target, source) for rule in rules)


def untransposed(rules: Iterable[Rule]) -> Rules:
    """Returns the same rules for source matrices (in, out), as in GPT-2's ``Conv1D``."""
    return tuple(dataclasses.replace(rule, transpose=False) for rule in rules)


@dataclasses.dataclass(frozen=True)
class Link:
    """Target arrays and the source arrays that hold the same numbers.

    Attributes:
        target: names in jaxformer.
        source: names in the other code base.
        target_shapes: in the order of ``target``.
        source_shapes: in the order of ``source``.
        rule: the rule that gave the link.
        indices: the values of the ``*`` of the rule.
    """

    target: tuple[str, ...]
    source: tuple[str, ...]
    target_shapes: tuple[Shape, ...]
    source_shapes: tuple[Shape, ...]
    rule: Rule
    indices: tuple[str, ...]

    def to_target(self, source: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the target arrays, C-contiguous; some may be the source arrays themselves."""
        return [contiguous(array) for array in self.view_as_target(source)]

    def view_as_target(self, source: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the target arrays, as views of the source arrays where that is possible."""
        flip = self._is_kernel and not self.rule.transpose
        arrays = [turned(array) for array in source] if flip else source
        arrays = self.rule.packing.unpack(
            arrays, [self._outputs_first(s) for s in self.target_shapes]
        )
        return [turned(array) if self._is_kernel else array for array in arrays]

    def view_as_source(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the source arrays, as views of the target arrays where that is possible."""
        arrays = self.rule.packing.pack([turned(a) if self._is_kernel else a for a in target])
        flip = self._is_kernel and not self.rule.transpose
        return [turned(array) if flip else array for array in arrays]

    @property
    def is_transposed(self) -> bool:
        """Whether the target of one source has its axes the other way round."""
        return self._is_kernel and self.rule.transpose

    def describe(self) -> str:
        """Returns what is done to the arrays on import, in words; ``none`` if nothing."""
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
        return turned_shape(shape) if self._is_kernel else shape


def link(rules: Iterable[Rule], shapes: Mapping[str, Shape]) -> tuple[list[Link], list[str]]:
    """Applies rules to the arrays of one model.

    Args:
        rules: at most one may match a name.
        shapes: of the target arrays, by name.

    Returns:
        The links in the order of the target names, and the target names that no rule matches.
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
    packed = rule.packing.shapes([turned_shape(s) if is_kernel else s for s in shapes])
    flip = is_kernel and not rule.transpose
    return Link(
        target,
        tuple(name.removeprefix(rule.joiner) for name in source),
        tuple(shapes),
        tuple(turned_shape(shape) if flip else shape for shape in packed),
        rule,
        indices,
    )


def _pattern(target: str) -> re.Pattern[str]:
    """Compiles a path: matches one leaf or all of a module's; the last group is the leaf's kind."""
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
    """Returns the array in C order: itself if it is so already, else a copy."""
    if _is_better_in_tiles(array):
        result = np.empty_like(array, order="C")
        copy_into(result, array)
        return result
    # ``ascontiguousarray`` would make a 0-d array 1-d.
    return np.array(array, order="C", copy=None)


def copy_into(target: np.ndarray, array: np.ndarray) -> None:
    """Copies an array into one of its shape and dtype that is in C order.

    Raises:
        ValueError: it has another shape or dtype.
    """
    wanted, found = (target.shape, target.dtype), (array.shape, array.dtype)
    if wanted != found:
        raise ValueError(f"the array must have shape and dtype {wanted}: got {found}")
    if not _is_better_in_tiles(array):
        target[...] = array
        return
    for top in range(0, array.shape[0], TILE):
        for left in range(0, array.shape[1], TILE):
            place = np.s_[top : top + TILE, left : left + TILE]
            target[place] = array[place]


def _is_better_in_tiles(array: np.ndarray) -> bool:
    """Returns whether to copy tile by tile.

    numpy walks a transposed matrix in steps of a whole row, each of which misses the cache: tile by
    tile it takes a third of the time in float32, and a ninth in bfloat16.
    """
    return array.ndim == 2 and not array.flags.c_contiguous and array.size > TILE**2
