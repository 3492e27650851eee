"""Names of the candidate's modules, as labels of what was found."""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from flax import nnx

from jaxformer.parameters import join_path
from jaxformer.parity.findings import Node, RootCause
from jaxformer.parity.matching.names import check_names
from jaxformer.parity.matching.parameters import ParameterMatches


class Labels:
    """Paths of the candidate that belong to modules of the reference.

    They divide nothing: what is compared, and what is found, is the same without them.

    Args:
        names: candidate paths to reference paths.
        kinds: the classes of the candidate's modules, by path.
        held: the names of the parameters and buffers in each module of the reference, by path.

    Attributes:
        names: the same.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        kinds: Mapping[str, str],
        held: Mapping[str, Collection[str]],
    ):
        self.names, self._kinds, self._held = dict(names), kinds, held
        self._of: dict[str, list[str]] = defaultdict(list)
        for own, other in names.items():
            self._of[other].append(own)

    @classmethod
    def of_user(cls, names: Mapping[str, str], candidate: nnx.Module, reference: Any) -> "Labels":
        """Returns the user's names of modules as labels.

        Args:
            names: candidate paths to reference paths.
            candidate: an NNX module.
            reference: the model.

        Raises:
            ValueError: a path does not exist; all such paths are listed.
        """
        kinds = {
            join_path(path): type(inner).__name__ for path, inner in nnx.iter_modules(candidate)
        }
        held = arrays_held(reference)
        check_names(names, kinds, held)
        return cls(names, kinds, held)

    def nodes(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns nodes with the paths and classes that the candidate has for them."""
        return [self._node(node) for node in nodes]

    def causes(self, causes: Iterable[RootCause]) -> list[RootCause]:
        """Returns root causes with the path of the innermost named module around them."""
        return [
            dataclasses.replace(cause, candidate_path=self._around(cause.torch_module))
            for cause in causes
        ]

    def wrong(self, parameters: ParameterMatches) -> Iterator[str]:
        """Yields a sentence for each pair of names whose modules hold no numbers in common.

        Args:
            parameters: which of both sides are equal, or almost.
        """
        nearest = {one.candidate: {one.reference} for one in parameters.wrong}
        whole = {name: set(twins) for name, twins in parameters.whole.items()}
        found = {**whole, **parameters.in_parts, **nearest}
        for own, other in self.names.items():
            twins = [t for name, t in found.items() if not own or name.startswith(f"{own}.")]
            if twins and not any(one.intersection(self._held[other]) for one in twins):
                yield (
                    f"names pairs {own or 'the model'} with {other or 'the model'}, but it holds "
                    f"the numbers of {self._owner(twins[0])}"
                )

    def _node(self, node: Node) -> Node:
        own = self._of.get(node.reference_path)
        if not own or not node.reference_path:
            return node
        kind = " + ".join(dict.fromkeys(self._kinds[path] for path in own))
        return dataclasses.replace(node, path=" + ".join(own), kind=kind)

    def _around(self, path: str) -> str:
        while path and path not in self._of:
            path = path.rpartition(".")[0]
        return " + ".join(self._of[path]) if path else ""

    def _owner(self, parameters: Iterable[str]) -> str:
        """Returns the named module that holds parameters, or else the innermost one."""
        first = min(parameters)
        named = [path for path in self._of if first in self._held[path]]
        return max(named, key=len, default=first.rpartition(".")[0])


def arrays_held(reference: Any) -> dict[str, set[str]]:
    """Returns the names of the parameters and buffers in each module of the reference, by path."""
    arrays = [*reference.named_parameters(), *reference.named_buffers()]
    # A tied parameter has one name, and belongs to several modules.
    known = {id(tensor): name for name, tensor in arrays}
    return {
        path: {known[id(tensor)] for tensor in (*inner.parameters(), *inner.buffers())}
        for path, inner in reference.named_modules(remove_duplicate=False)
    }
