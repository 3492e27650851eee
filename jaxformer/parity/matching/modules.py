"""Which modules of theirs are which of ours: read off the rules that carry the weights."""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jaxformer.layers import Dropout
from jaxformer.parameters import join_path
from jaxformer.porting.mapping.dialect import ModuleMapping
from jaxformer.porting.mapping.rules import ONE_TO_ONE, Link, Packing, Rule

# Our tied head is a method of the embedding: a pair of its own, as theirs is a module.
TIED_HEAD = "token_embedding.attend"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Modules of ours and of theirs that compute the same.

    Attributes:
        candidate: paths; several where one of theirs holds them all.
        reference: paths; several where they have one a head.
        packing: how several outputs lie in one.
        parameters: their own parameters, by our names.
        alone: whether they can be run by themselves; if not, they are judged with what is around
            them.
    """

    candidate: tuple[str, ...]
    reference: tuple[str, ...]
    packing: Packing = ONE_TO_ONE
    parameters: tuple[str, ...] = ()
    alone: bool = True

    @property
    def path(self) -> str:
        """Ours, as a report names it."""
        return " + ".join(self.candidate)

    @property
    def reference_path(self) -> str:
        """Theirs, as a report names it."""
        shown = self.reference[:1] + (("…",) if len(self.reference) > 1 else ())
        return " ".join(shown)

    def part(self, reference: list[np.ndarray], shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
        """Their outputs as ours, which have the given shapes."""
        first = [(shape[-1], *shape[:-1]) for shape in shapes]
        return [_last(a) for a in self.packing.unpack([_first(a) for a in reference], first)]


def pair_modules(
    module: Any, counterpart: ModuleMapping, links: Sequence[Link], reference: Mapping[str, Any]
) -> list[Pair]:
    """All pairs, the whole model first.

    Args:
        module: ours.
        counterpart: what it was ported from.
        links: of its parameters.
        reference: all their modules by path.
    """
    candidate_paths = [
        join_path(path)
        for path, node in nnx.iter_modules(module)
        if not isinstance(node, Dropout | nnx.List)
    ]
    there = set(reference)
    leaves = _pairs_of_leaves(links, there)
    pairs: dict[tuple[str, ...], Pair] = {("",): Pair(("",), ("",))}
    scopes = [*_scopes(counterpart.rules_for(module), candidate_paths)]
    # Where both sides have one name for a module no rule need speak of it.
    scopes += [(path, path) for path in candidate_paths if path]
    for path, other in scopes:
        if other in there and _hold_the_same(path, other, leaves):
            pairs.setdefault((path,), Pair((path,), (other,)))
    for leaf in leaves:
        held = next((p for p in pairs.values() if p.reference == leaf.reference), None)
        if leaf.candidate == ("",):
            held = pairs[leaf.candidate]
        if held is not None and _is_within(leaf.candidate, held.candidate[0]):
            # Arrays of a module that has parts: torch.nn's in_proj_weight is the attention's own.
            parameters = (*held.parameters, *leaf.parameters)
            pairs[held.candidate] = dataclasses.replace(held, parameters=parameters)
        else:
            pairs[leaf.candidate] = leaf
    for owner in _tied_heads(counterpart, links):
        held = next((p for p in pairs.values() if p.reference == (owner,)), None)
        if held is not None:
            # Their head is our product with the embedding and what comes after it: BERT's bias.
            pairs[held.candidate] = dataclasses.replace(held, alone=False)
        elif owner in there:
            pairs[(TIED_HEAD,)] = Pair((TIED_HEAD,), (owner,))
    if TIED_HEAD in there:
        pairs[(TIED_HEAD,)] = Pair((TIED_HEAD,), (TIED_HEAD,))
    return [
        dataclasses.replace(pair, alone=pair.alone and not any(map(_does_more, of)))
        for pair in pairs.values()
        if (of := [reference[path] for path in pair.reference])
    ]


def _tied_heads(counterpart: ModuleMapping, links: Sequence[Link]) -> list[str]:
    """Their modules whose matrix is the token embedding, where ours has no matrix of its own."""
    names = {name for each in links for name in each.source}
    embedding = {n for e in links if "token_embedding.embedding" in e.target for n in e.source}
    return [
        alias.rpartition(".")[0]
        for alias, name in counterpart.aliases.items()
        if name in embedding and alias not in names
    ]


def _does_more(reference: Any) -> bool:
    """Whether a module of theirs does something that ours leaves to the module around it.

    BLOOM's attention adds the residual stream, Gemma's embedding multiplies by its scale.
    """
    if hasattr(reference, "embed_scale"):
        return True
    return "residual" in inspect.signature(reference.forward).parameters


def _pairs_of_leaves(links: Sequence[Link], there: set[str]) -> list[Pair]:
    """The modules that hold arrays which are linked."""
    pairs: dict[tuple[str, ...], Pair] = {}
    for each in links:
        candidate, reference = (
            tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))
            for names in (each.target, each.source)
        )
        if all(path in there for path in reference):
            before = pairs.get(candidate, Pair(candidate, reference, each.rule.packing))
            parameters = (*before.parameters, *each.target)
            pairs[candidate] = dataclasses.replace(before, parameters=parameters)
    return list(pairs.values())


def _scopes(rules: Iterable[Rule], paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The modules that rules are nested in: paths of ours, and of theirs."""
    seen = set()
    for rule in rules:
        around = ""
        for candidate, reference in rule.scopes:
            # A scope without a name of its own on their side is no module there.
            if candidate and reference != around and (candidate, reference) not in seen:
                seen.add((candidate, reference))
                for path, indices in _matches(candidate, paths):
                    yield path, _fill(reference, indices)
            around = reference


def _hold_the_same(candidate: str, reference: str, leaves: Iterable[Pair]) -> bool:
    """Whether a module of theirs holds just what ours does: BERT's attention holds a norm too."""
    return all(
        _is_within(leaf.candidate, candidate) == _is_within(leaf.reference, reference)
        for leaf in leaves
    )


def _is_within(paths: Iterable[str], outer: str) -> bool:
    return all(path == outer or path.startswith(f"{outer}.") or not outer for path in paths)


def pair_by_map(
    module: Any, names: Mapping[str, str], reference_paths: Iterable[str]
) -> list[Pair]:
    """Pairs that the caller names: paths of ours to paths of theirs.

    Raises:
        ValueError: one of them is not there; all such are listed.
    """
    candidate_paths = {join_path(path) for path, _ in nnx.iter_modules(module)}
    there = set(reference_paths)
    problems = [
        f"we have no {candidate}" for candidate in names if candidate not in candidate_paths
    ]
    problems += [
        f"they have no {reference}" for reference in names.values() if reference not in there
    ]
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
    single = {
        pair.candidate[0]
        for pair in pairs
        if len(pair.candidate) == 1 and pair.candidate != (TIED_HEAD,)
    }
    return {pair.candidate: _parent(pair.candidate, single) for pair in pairs}


def _parent(candidate: tuple[str, ...], single: set[str]) -> tuple[str, ...] | None:
    if candidate == ("",):
        return None
    if candidate == (TIED_HEAD,):
        return ("",)
    parts = candidate[0].split(".")
    around = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
    return next(((a,) for a in around if a in single and _is_within(candidate, a)), ("",))


def in_order(
    pairs: Sequence[Pair],
    parents: Mapping[tuple[str, ...], tuple[str, ...] | None],
    candidate: Mapping[str, Any],
    reference: Mapping[str, Any],
) -> list[Pair]:
    """A parent before its parts, and these in the order of calls.

    Args:
        pairs: in any order.
        parents: see ``parents_of``.
        candidate: the first call of each of our modules.
        reference: the first call of each of theirs, which goes before.
    """
    inside: dict[Any, list[Pair]] = {}
    for pair in pairs:
        inside.setdefault(parents[pair.candidate], []).append(pair)

    def place(pair: Pair) -> tuple[int, int]:
        there = [reference[p].order for p in pair.reference if p in reference]
        here = [candidate[p].order for p in pair.candidate if p in candidate]
        return min(there, default=len(reference)), min(here, default=len(candidate))

    def below(parent: Any) -> Iterator[Pair]:
        for pair in sorted(inside.get(parent, ()), key=place):
            yield pair
            yield from below(pair.candidate)

    return list(below(None))
