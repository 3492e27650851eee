"""Pairs of candidate and reference modules, from the rules that port the weights."""

import dataclasses
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jaxformer.layers import Dropout
from jaxformer.parameters import join_path
from jaxformer.parity.matching.names import check_names
from jaxformer.porting.mapping.adapter import ModuleMapping
from jaxformer.porting.mapping.packings import ONE_TO_ONE, Packing, Reshaped
from jaxformer.porting.mapping.rules import Link, Rule

# The candidate's tied head is a method of the embedding; the reference's is a module.
TIED_HEAD = "token_embedding.attend"
# The candidate paths of a pair.
PairKey = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Candidate and reference modules that compute the same.

    Attributes:
        candidate: paths; several where one reference module does the work of all of them.
        reference: paths; several where the reference has one module for each head.
        packing: how the outputs of several modules lie in one array.
        parameters: the names of the candidate modules' own parameters.
        can_run_isolated: whether they are judged by themselves, or else with the module around.
    """

    candidate: tuple[str, ...]
    reference: tuple[str, ...]
    packing: Packing = ONE_TO_ONE
    parameters: tuple[str, ...] = ()
    can_run_isolated: bool = True

    @property
    def path(self) -> str:
        """The candidate modules, as a report names them."""
        return " + ".join(self.candidate)

    @property
    def reference_path(self) -> str:
        """The reference modules, as a report names them."""
        shown = self.reference[:1] + (("…",) if len(self.reference) > 1 else ())
        return " ".join(shown)

    def unpack(
        self, reference: list[np.ndarray], shapes: list[tuple[int, ...]]
    ) -> list[np.ndarray]:
        """Returns the reference's outputs as the candidate's, which have the given shapes."""
        first = [(shape[-1], *shape[:-1]) for shape in shapes]
        arrays = self.packing.unpack([np.moveaxis(a, -1, 0) for a in reference], first)
        return [np.moveaxis(a, 0, -1) for a in arrays]


def pair_modules(
    module: Any, mapping: ModuleMapping, links: Sequence[Link], reference: Mapping[str, Any]
) -> list[Pair]:
    """Returns all pairs, the whole model first.

    Args:
        module: the candidate.
        mapping: how the reference is ported to it.
        links: of its parameters.
        reference: all reference modules by path.
    """
    candidate_paths = [
        join_path(path)
        for path, node in nnx.iter_modules(module)
        if not isinstance(node, Dropout | nnx.List)
    ]
    reference_paths = set(reference)
    leaves = _pairs_of_leaves(links, reference_paths)
    pairs: dict[PairKey, Pair] = {("",): Pair(("",), ("",))}
    rules = mapping.rules_for(module)
    scopes = [*_scopes(rules, candidate_paths)]
    # OLMo's norms have no parameters that would pair them.
    empty = [p for p in candidate_paths if not any(_is_within(e.candidate, p) for e in leaves)]
    scopes += _renamed(rules, empty)
    # A module of the same name on both sides needs no rule.
    scopes += [(path, path) for path in candidate_paths if path]
    for path, other in scopes:
        if other in reference_paths and _have_same_leaves(path, other, leaves):
            pairs.setdefault((path,), Pair((path,), (other,)))
    for leaf in leaves:
        outer = next((p for p in pairs.values() if p.reference == leaf.reference), None)
        if isinstance(leaf.packing, Reshaped):
            # A convolution's matrix, or a row that a larger module of the reference adds.
            outer = pairs.get((leaf.candidate[0].rpartition(".")[0],), pairs[("",)])
        elif leaf.candidate == ("",):
            outer = pairs[leaf.candidate]
        if outer is not None and _is_within(leaf.candidate, outer.candidate[0]):
            # The parameters belong to the outer module: torch.nn's in_proj_weight, for one, is the
            # attention's own.
            parameters = (*outer.parameters, *leaf.parameters)
            pairs[outer.candidate] = dataclasses.replace(outer, parameters=parameters)
        else:
            pairs[leaf.candidate] = leaf
    for head in _tied_heads(mapping, links):
        outer = next((p for p in pairs.values() if p.reference == (head,)), None)
        if outer is not None:
            # This head does more than the product with the embedding: BERT's adds a bias.
            pairs[outer.candidate] = dataclasses.replace(outer, can_run_isolated=False)
        elif head in reference_paths:
            pairs[(TIED_HEAD,)] = Pair((TIED_HEAD,), (head,))
    if TIED_HEAD in reference_paths:
        pairs[(TIED_HEAD,)] = Pair((TIED_HEAD,), (TIED_HEAD,))
    return [
        dataclasses.replace(
            pair,
            can_run_isolated=pair.can_run_isolated
            and not any(_does_more(reference[path]) for path in pair.reference),
        )
        for pair in pairs.values()
    ]


def _tied_heads(mapping: ModuleMapping, links: Sequence[Link]) -> list[str]:
    """Returns reference modules whose matrix is the token embedding."""
    names = {name for each in links for name in each.source}
    embedding = {n for e in links if "token_embedding.embedding" in e.target for n in e.source}
    return [
        alias.rpartition(".")[0]
        for alias, name in mapping.aliases.items()
        if name in embedding and alias not in names
    ]


def _does_more(reference: Any) -> bool:
    """Returns whether a reference module also does work of the module around the candidate's.

    BLOOM's attention adds the residual stream, Gemma's embedding multiplies by its scale, and
    DeepSeek's router returns what it chose in any order.
    """
    if hasattr(reference, "embed_scale") or hasattr(reference, "e_score_correction_bias"):
        return True
    return "residual" in inspect.signature(reference.forward).parameters


def _pairs_of_leaves(links: Sequence[Link], reference_paths: set[str]) -> list[Pair]:
    """Returns the pairs of modules that hold linked parameters."""
    pairs: dict[PairKey, Pair] = {}
    for each in links:
        candidate, reference = (
            tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))
            for names in (each.target, each.source)
        )
        if all(path in reference_paths for path in reference):
            before = pairs.get(candidate, Pair(candidate, reference, each.rule.packing))
            parameters = (*before.parameters, *each.target)
            pairs[candidate] = dataclasses.replace(before, parameters=parameters)
    return list(pairs.values())


def _scopes(rules: Iterable[Rule], paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the candidate and reference paths of the modules that rules are nested in."""
    seen = set()
    for rule in rules:
        around = ""
        for candidate, reference in rule.scopes:
            # A scope that adds no name on the reference side is no module there.
            if candidate and reference != around and (candidate, reference) not in seen:
                seen.add((candidate, reference))
                for path, indices in _match_paths(candidate, paths):
                    yield path, _fill_indices(reference, indices)
            around = reference


def _renamed(rules: Iterable[Rule], paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the candidate and reference paths of the modules that rules pair one to one."""
    for rule in rules:
        if len(rule.target) == len(rule.source) == 1 and rule.packing is ONE_TO_ONE:
            for path, indices in _match_paths(rule.target[0], paths):
                yield path, _fill_indices(rule.source[0], indices)


def _have_same_leaves(candidate: str, reference: str, leaves: Iterable[Pair]) -> bool:
    """Returns whether both modules hold the same parameters: BERT's attention also holds a norm."""
    return all(
        _is_within(leaf.candidate, candidate) == _is_within(leaf.reference, reference)
        for leaf in leaves
    )


def _is_within(paths: Iterable[str], outer: str) -> bool:
    return all(path == outer or path.startswith(f"{outer}.") or not outer for path in paths)


def pair_by_map(
    module: Any, names: Mapping[str, str], reference_paths: Iterable[str]
) -> list[Pair]:
    """Returns the pairs that the caller names, after the whole model.

    Args:
        module: the candidate.
        names: candidate paths to reference paths.
        reference_paths: those of all reference modules.

    Raises:
        ValueError: a path does not exist; all such paths are listed.
    """
    candidate_paths = {join_path(path) for path, _ in nnx.iter_modules(module)}
    check_names(names, candidate_paths, set(reference_paths))
    pairs = {"": Pair(("",), ("",))}
    return list({**pairs, **{o: Pair((o,), (t,)) for o, t in names.items()}}.values())


def _match_paths(pattern: str, paths: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    compiled = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    return [(path, m.groups()) for path in paths if (m := compiled.fullmatch(path))]


def _fill_indices(name: str, indices: Iterable[str]) -> str:
    for index in indices:
        name = name.replace("*", index, 1)
    return name


def parents_of(pairs: Sequence[Pair]) -> dict[PairKey, PairKey | None]:
    """Returns for each pair the innermost pair of single modules around it."""
    single = {
        pair.candidate[0]
        for pair in pairs
        if len(pair.candidate) == 1 and pair.candidate != (TIED_HEAD,)
    }
    return {pair.candidate: _parent(pair.candidate, single) for pair in pairs}


def _parent(candidate: PairKey, single: set[str]) -> PairKey | None:
    if candidate == ("",):
        return None
    if candidate == (TIED_HEAD,):
        return ("",)
    parts = candidate[0].split(".")
    around = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
    return next(((a,) for a in around if a in single and _is_within(candidate, a)), ("",))


def depths_of(
    pairs: Iterable[Pair], parents: Mapping[PairKey, PairKey | None]
) -> dict[PairKey, int]:
    """Returns how many pairs are around each pair; see ``parents_of``."""
    found = {}
    for pair in pairs:
        depth, parent = 0, parents[pair.candidate]
        while parent is not None:
            depth, parent = depth + 1, parents[parent]
        found[pair.candidate] = depth
    return found


def in_call_order(
    pairs: Sequence[Pair],
    parents: Mapping[PairKey, PairKey | None],
    candidate: Mapping[str, int],
    reference: Mapping[str, int],
) -> list[Pair]:
    """Returns the pairs in the order of calls, a parent before the pairs inside it.

    Of the pairs inside one, those that are not called come last.

    Args:
        pairs: in any order.
        parents: see ``parents_of``.
        candidate: the place of the first call of each candidate module.
        reference: the place of the first call of each reference module, which counts first.
    """
    inside: dict[Any, list[Pair]] = {}
    for pair in pairs:
        inside.setdefault(parents[pair.candidate], []).append(pair)

    def place(pair: Pair) -> tuple[float, float]:
        reference_orders = [reference[p] for p in pair.reference if p in reference]
        candidate_orders = [candidate[p] for p in pair.candidate if p in candidate]
        return (
            min(reference_orders, default=math.inf),
            min(candidate_orders, default=math.inf),
        )

    def below(parent: Any) -> Iterator[Pair]:
        for pair in sorted(inside.get(parent, ()), key=place):
            yield pair
            yield from below(pair.candidate)

    return list(below(None))
