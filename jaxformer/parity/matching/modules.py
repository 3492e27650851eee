"""Which modules of theirs are which of ours: read off the rules that carry the weights."""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jaxformer.layers import Dropout
from jaxformer.porting.mapping.dialect import Counterpart
from jaxformer.porting.mapping.rules import ONE_TO_ONE, Link, Packing, Rule

# Our tied head is a method of the embedding: a pair of its own, as theirs is a module.
TIED_HEAD = "token_embedding.attend"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Modules of ours and of theirs that compute the same.

    Attributes:
        ours: paths; several where one of theirs holds them all.
        theirs: paths; several where they have one a head.
        packing: how several outputs lie in one.
        parameters: their own parameters, by our names.
        alone: whether they can be run by themselves; if not, they are judged with what is around
            them.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    packing: Packing = ONE_TO_ONE
    parameters: tuple[str, ...] = ()
    alone: bool = True

    @property
    def path(self) -> str:
        """Ours, as a report names it."""
        return " + ".join(self.ours)

    @property
    def their_path(self) -> str:
        """Theirs, as a report names it."""
        shown = self.theirs[:1] + (("…",) if len(self.theirs) > 1 else ())
        return " ".join(shown)

    def part(self, theirs: list[np.ndarray], shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
        """Their outputs as ours, which have the given shapes."""
        first = [(shape[-1], *shape[:-1]) for shape in shapes]
        return [_last(a) for a in self.packing.unpack([_first(a) for a in theirs], first)]


def pair_modules(
    module: Any, counterpart: Counterpart, links: Sequence[Link], theirs: Mapping[str, Any]
) -> list[Pair]:
    """All pairs, the whole model first.

    Args:
        module: ours.
        counterpart: what it was ported from.
        links: of its parameters.
        theirs: all their modules by path.
    """
    our_paths = [
        ".".join(map(str, path))
        for path, node in nnx.iter_modules(module)
        if not isinstance(node, Dropout | nnx.List)
    ]
    there = set(theirs)
    leaves = _pairs_of_leaves(links, there)
    pairs: dict[tuple[str, ...], Pair] = {("",): Pair(("",), ("",))}
    scopes = [*_scopes(counterpart.rules_for(module), our_paths)]
    # Where both sides have one name for a module no rule need speak of it.
    scopes += [(path, path) for path in our_paths if path]
    for path, other in scopes:
        if other in there and _hold_the_same(path, other, leaves):
            pairs.setdefault((path,), Pair((path,), (other,)))
    for leaf in leaves:
        held = next((p for p in pairs.values() if p.theirs == leaf.theirs), None)
        if leaf.ours == ("",):
            held = pairs[leaf.ours]
        if held is not None and _is_within(leaf.ours, held.ours[0]):
            # Arrays of a module that has parts: torch.nn's in_proj_weight is the attention's own.
            parameters = (*held.parameters, *leaf.parameters)
            pairs[held.ours] = dataclasses.replace(held, parameters=parameters)
        else:
            pairs[leaf.ours] = leaf
    for owner in _tied_heads(counterpart, links):
        held = next((p for p in pairs.values() if p.theirs == (owner,)), None)
        if held is not None:
            # Their head is our product with the embedding and what comes after it: BERT's bias.
            pairs[held.ours] = dataclasses.replace(held, alone=False)
        elif owner in there:
            pairs[(TIED_HEAD,)] = Pair((TIED_HEAD,), (owner,))
    if TIED_HEAD in there:
        pairs[(TIED_HEAD,)] = Pair((TIED_HEAD,), (TIED_HEAD,))
    return [
        dataclasses.replace(pair, alone=pair.alone and not any(map(_does_more, of)))
        for pair in pairs.values()
        if (of := [theirs[path] for path in pair.theirs])
    ]


def _tied_heads(counterpart: Counterpart, links: Sequence[Link]) -> list[str]:
    """Their modules whose matrix is the token embedding, where ours has no matrix of its own."""
    names = {name for each in links for name in each.theirs}
    embedding = {n for e in links if "token_embedding.embedding" in e.ours for n in e.theirs}
    return [
        alias.rpartition(".")[0]
        for alias, name in counterpart.aliases.items()
        if name in embedding and alias not in names
    ]


def _does_more(theirs: Any) -> bool:
    """Whether a module of theirs does something that ours leaves to the module around it.

    BLOOM's attention adds the residual stream, Gemma's embedding multiplies by its scale.
    """
    if hasattr(theirs, "embed_scale"):
        return True
    return "residual" in inspect.signature(theirs.forward).parameters


def _pairs_of_leaves(links: Sequence[Link], there: set[str]) -> list[Pair]:
    """The modules that hold arrays which are linked."""
    pairs: dict[tuple[str, ...], Pair] = {}
    for each in links:
        ours, theirs = (
            tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))
            for names in (each.ours, each.theirs)
        )
        if all(path in there for path in theirs):
            before = pairs.get(ours, Pair(ours, theirs, each.rule.packing))
            parameters = (*before.parameters, *each.ours)
            pairs[ours] = dataclasses.replace(before, parameters=parameters)
    return list(pairs.values())


def _scopes(rules: Iterable[Rule], paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The modules that rules are nested in: paths of ours, and of theirs."""
    seen = set()
    for rule in rules:
        around = ""
        for ours, theirs in rule.scopes:
            # A scope without a name of its own on their side is no module there.
            if ours and theirs != around and (ours, theirs) not in seen:
                seen.add((ours, theirs))
                for path, indices in _matches(ours, paths):
                    yield path, _fill(theirs, indices)
            around = theirs


def _hold_the_same(ours: str, theirs: str, leaves: Iterable[Pair]) -> bool:
    """Whether a module of theirs holds just what ours does: BERT's attention holds a norm too."""
    return all(_is_within(leaf.ours, ours) == _is_within(leaf.theirs, theirs) for leaf in leaves)


def _is_within(paths: Iterable[str], outer: str) -> bool:
    return all(path == outer or path.startswith(f"{outer}.") or not outer for path in paths)


def pair_by_map(module: Any, names: Mapping[str, str], their_paths: Iterable[str]) -> list[Pair]:
    """Pairs that the caller names: paths of ours to paths of theirs.

    Raises:
        ValueError: one of them is not there; all such are listed.
    """
    our_paths = {".".join(map(str, path)) for path, _ in nnx.iter_modules(module)}
    there = set(their_paths)
    problems = [f"we have no {ours}" for ours in names if ours not in our_paths]
    problems += [f"they have no {theirs}" for theirs in names.values() if theirs not in there]
    if problems:
        raise ValueError("; ".join(problems))
    pairs = {"": Pair(("",), ("",))}
    return list({**pairs, **{o: Pair((o,), (t,)) for o, t in names.items()}}.values())


def _matches(pattern: str, paths: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    compiled = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    return [(path, m.groups()) for path in paths if (m := compiled.fullmatch(path))]


def _fill(name: str, indices: Iterable[str]) -> str:
    for index in indices:
        name = name.replace("*", index, 1)
    return name


def _first(array: np.ndarray) -> np.ndarray:
    return np.moveaxis(array, -1, 0)


def _last(array: np.ndarray) -> np.ndarray:
    return np.moveaxis(array, 0, -1)


def parents_of(pairs: Sequence[Pair]) -> dict[tuple[str, ...], tuple[str, ...] | None]:
    """Of each pair the innermost pair of single modules around it."""
    single = {pair.ours[0] for pair in pairs if len(pair.ours) == 1 and pair.ours != (TIED_HEAD,)}
    return {pair.ours: _parent(pair.ours, single) for pair in pairs}


def _parent(ours: tuple[str, ...], single: set[str]) -> tuple[str, ...] | None:
    if ours == ("",):
        return None
    if ours == (TIED_HEAD,):
        return ("",)
    parts = ours[0].split(".")
    around = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
    return next(((a,) for a in around if a in single and _is_within(ours, a)), ("",))


def in_order(
    pairs: Sequence[Pair],
    parents: Mapping[tuple[str, ...], tuple[str, ...] | None],
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
) -> list[Pair]:
    """A parent before its parts, and these in the order of calls.

    Args:
        pairs: in any order.
        parents: see ``parents_of``.
        ours: the first call of each of our modules.
        theirs: the first call of each of theirs, which goes before.
    """
    inside: dict[Any, list[Pair]] = {}
    for pair in pairs:
        inside.setdefault(parents[pair.ours], []).append(pair)

    def place(pair: Pair) -> tuple[int, int]:
        there = [theirs[p].order for p in pair.theirs if p in theirs]
        here = [ours[p].order for p in pair.ours if p in ours]
        return min(there, default=len(theirs)), min(here, default=len(ours))

    def below(parent: Any) -> Iterator[Pair]:
        for pair in sorted(inside.get(parent, ()), key=place):
            yield pair
            yield from below(pair.ours)

    return list(below(None))
