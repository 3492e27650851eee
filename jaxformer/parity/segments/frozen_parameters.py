"""Gradients of parameters that the reference does not train, and that a candidate may stop."""

from collections.abc import Callable, Collection, Iterator

import numpy as np

from jaxformer.parity.words import listed


class FrozenParameters:
    """Parameters without gradients (``requires_grad`` is False), beside others that have them.

    Args:
        names: of the reference.

    Attributes:
        inputs: of those of the candidate whose gradient was not compared: before all that is
            trained, stopped gradients are missing from it.
        has_stops: whether the candidate has no gradient for some of these parameters either.
    """

    def __init__(self, names: Collection[str]):
        self._names = frozenset(names)
        self._trained: list[str] = []
        self.inputs: list[str] = []
        self.has_stops = False

    def are_all(self, names: Collection[str]) -> bool:
        """Returns whether the reference trains none of some parameters."""
        return bool(names) and self._names.issuperset(names)

    def note(self, name: str, is_stopped: bool) -> None:
        """Takes the name of such a parameter in the candidate, and whether it has no gradient."""
        self.has_stops |= is_stopped
        if not is_stopped:
            self._trained.append(name)

    def stopped_parts(
        self, names: Collection[str], gradient: np.ndarray, place: Callable[[str], np.ndarray]
    ) -> set[str]:
        """Returns which of the parameters that one of the candidate is made of have no gradient.

        Args:
            names: of the reference.
            gradient: of the candidate's parameter.
            place: returns which entries of it are those of one of the reference.
        """
        found = {n for n in self._names.intersection(names) if not gradient[place(n)].any()}
        self.has_stops |= bool(found)
        return found

    def remarks(self) -> Iterator[str]:
        """Yields what to say of gradients that only one side has."""
        if self._trained:
            yield (
                "the reference does not train these (requires_grad is False), the candidate does: "
                f"{listed(self._trained)}"
            )
        if self.inputs:
            yield (
                "the candidate stops gradients that the reference does not use: those of these "
                f"inputs were not compared: {listed(self.inputs)}"
            )
