"""What must be equal where it is known which modules of the two sides are the same.

What enters a module of the candidate must be what enters the reference's, and so must what it
returns, and the cotangents of both. So each module answers for what its own code makes: for what it
returns, and for what enters the modules inside it.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.findings import INPUT_OF, Difference
from jaxformer.parity.matching.layouts import Layout
from jaxformer.parity.matching.pairs import Pair, PairKey
from jaxformer.parity.matching.values import Match
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.module_marks import Mark
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.recording.operators.torch_calls import ModuleCall
from jaxformer.porting.mapping.packings import ONE_TO_ONE


@dataclasses.dataclass(eq=False)
class Requirement:
    """That the sum of some values of the candidate must be a value of the reference.

    Attributes:
        owner: the pair of modules whose code answers for it.
        name: what reports call it.
        values: of the candidate, in the order of the run.
        wanted: of the reference.
        source: what the values were made of, where they only show it: a mask or token ids.
        right: makes the right array of the source, given the one that it has.
        measure: returns how far off the source is, given its array.
        same: a value of the reference that the wanted one is, in another layout, and that layout.
        is_known: whether other modules leave it to be known.
        difference: how far it was off; None as long as it was not compared.
    """

    owner: PairKey
    name: str
    values: list[Value]
    wanted: Value
    source: Value | None = None
    right: Callable[[Any], Any] | None = None
    measure: Callable[[Any], Difference] | None = None
    same: tuple[Value, Layout] | None = None
    is_known: bool = True
    difference: Difference | None = None

    @property
    def place(self) -> int:
        """The place on the candidate's tape of what it is about; -1 if nothing is there."""
        if self.source is not None:
            return self.source.index
        return max((value.index for value in self.values), default=-1)


@dataclasses.dataclass(frozen=True)
class Unmatched:
    """Why the calls of a pair could not be matched.

    Attributes:
        message: the reason, for the report.
        is_uncalled: whether neither side calls the modules.
    """

    message: str
    is_uncalled: bool = False


@dataclasses.dataclass(frozen=True)
class OwnCall:
    """One call of a module of the candidate: the values that have its marks, by their place.

    Attributes:
        path: of the module.
        number: which of the calls in the code it is.
        time: how often that call was made before, as a step of a scan.
        entered: what entered it.
        returned: the floats that it returned.
        chosen: the integers of a named tuple that it returned.
        names: of what entered it, those that were given by name.
        weights: of its attention, if it computed any.
    """

    path: str
    number: int
    time: int
    entered: dict[int, Value] = dataclasses.field(default_factory=dict)
    returned: dict[int, Value] = dataclasses.field(default_factory=dict)
    chosen: dict[int, Value] = dataclasses.field(default_factory=dict)
    names: dict[int, str] = dataclasses.field(default_factory=dict)
    weights: dict[int, Value] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PairCall:
    """One call of a pair of modules.

    Attributes:
        pair: the modules.
        own: a call of each module of the candidate.
        right: a call of each module of the reference.
        entered: by place in the first module of the candidate, which tensor of the reference
            enters.
        returned: of each module of the candidate, by place, which tensor the reference returns.
    """

    pair: Pair
    own: tuple[OwnCall, ...]
    right: tuple[ModuleCall, ...]
    entered: dict[int, int]
    returned: tuple[dict[int, int], ...]


class KnownModules:
    """The calls of pairs of modules, and what they require.

    Args:
        pairs: the modules.
        parents: the pair around each pair.
        marks: values of the candidate with a mark, in the order of the run.
        calls: the calls of the reference's modules, by path.
        matches: which values of the reference each value of the candidate equals.
        tapes: the candidate's and the reference's.
        answered: pairs that are not run: what they return is given, and no gradient goes through.

    Attributes:
        calls: of each pair; none where they could not be matched.
        unmatched: of the other pairs, why not.
        pairs: the modules.
        own: the calls of the candidate's modules, by path.
        tapes: the candidate's and the reference's.
        answered: pairs that are not run: what they return is given, and no gradient goes through.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        parents: Mapping[PairKey, PairKey | None],
        marks: Sequence[tuple[Mark, Value]],
        calls: Mapping[str, Sequence[ModuleCall]],
        matches: Mapping[int, Sequence[Match]],
        tapes: tuple[Tape, Tape],
        answered: Collection[PairKey] = (),
    ):
        self.answered, self.tapes, self.pairs = answered, tapes, pairs
        self._parents, self._matches = parents, matches
        self._outermost = next(key for key, parent in parents.items() if parent is None)
        self.own = calls_of(marks)
        self._right = calls
        self.calls: dict[PairKey, list[PairCall]] = {}
        self.unmatched: dict[PairKey, Unmatched] = {}
        for pair in pairs:
            found = self._match(pair)
            if isinstance(found, Unmatched):
                self.unmatched[pair.candidate] = found
            self.calls[pair.candidate] = [] if isinstance(found, Unmatched) else found

    def around(self, key: PairKey) -> PairKey:
        """Returns the innermost pair around one whose calls were matched."""
        parent = self._parents[key]
        while parent is not None and not self.calls[parent]:
            parent = self._parents[parent]
        return self._outermost if parent is None else parent

    def is_in(self, key: PairKey, outer: PairKey) -> bool:
        """Returns whether a pair is inside of another one."""
        parent = self._parents[key]
        while parent is not None and parent != outer:
            parent = self._parents[parent]
        return parent is not None

    def is_outermost(self, key: PairKey) -> bool:
        """Returns whether no pair is around one."""
        return self._parents[key] is None

    def place_of(self, key: PairKey, path: str) -> tuple[PairKey, str]:
        """Returns the pair around one, and the path of a module of it within that."""
        owner = self.around(key)
        return owner, path.removeprefix(f"{owner[0]}.") if owner[0] else path

    def _match(self, pair: Pair) -> list[PairCall] | Unmatched:
        own = [self.own[path] for path in pair.candidate if path in self.own]
        right = [self._right[path] for path in pair.reference if self._right.get(path)]
        if not own and not right:
            return Unmatched("neither side calls it", is_uncalled=True)
        together = "compared together with the module around it"
        if len(own) < len(pair.candidate):
            return Unmatched(f"{together}: the candidate does not call it")
        if len(right) < len(pair.reference):
            return Unmatched(f"{together}: the reference does not call it")
        if not pair.can_run_isolated:
            return Unmatched(together)
        counts = {len(each) for each in own}, {len(each) for each in right}
        if len(counts[0] | counts[1]) > 1 and (counts[1] != {1} or len(counts[0]) > 1):
            return Unmatched(
                f"called {_describe_counts(counts[0])} by the candidate, "
                f"{_describe_counts(counts[1])} by the reference"
            )
        found = []
        for number in range(max(counts[0])):
            made = tuple(each[number] for each in own)
            wanted = tuple(each[min(number, len(each) - 1)] for each in right)
            call = self._align(pair, made, wanted)
            if isinstance(call, Unmatched):
                return call
            found.append(call)
        return found

    def _align(
        self, pair: Pair, own: tuple[OwnCall, ...], right: tuple[ModuleCall, ...]
    ) -> PairCall | Unmatched:
        returned = []
        for place, call in enumerate(own):
            if pair.packing is ONE_TO_ONE:
                found = self._alike(call.returned, right[0].returned)
            else:
                fits = all(0 in one.returned for one in own) and all(one.returned for one in right)
                share = self._share(pair, place, own, right) if fits else None
                found = {} if share is None else {0: 0}
            if not found or (0 not in found and pair.candidate != ("",)):
                shapes = [
                    ", ".join(str(v.shape) for v in values) or "none"
                    for values in (own[0].returned.values(), right[0].returned)
                ]
                return Unmatched(
                    f"the outputs cannot be aligned: candidate {shapes[0]}, reference {shapes[1]}"
                )
            returned.append(found)
        entered = self._alike(own[0].entered, right[0].entered)
        return PairCall(pair, own, right, entered, tuple(returned))

    def _share(
        self, pair: Pair, place: int, own: Sequence[OwnCall], right: Sequence[ModuleCall]
    ) -> np.ndarray | None:
        """Returns which columns of the reference's results, side by side, a module returns."""
        widths = [call.returned[0].shape[-1] for call in right]
        ends = np.cumsum(widths)
        columns = [np.arange(end - width, end) for end, width in zip(ends, widths, strict=True)]
        shapes: list[tuple[int, ...]] = [(call.returned[0].shape[-1],) for call in own]
        try:
            return pair.unpack(columns, shapes)[place]
        except (ValueError, IndexError):
            return None

    def _alike(self, own: Mapping[int, Value], right: Sequence[Value]) -> dict[int, int]:
        """Returns which values of the reference those of a call are: equal ones, or in order."""
        found: dict[int, int] = {}
        floats = {n: value for n, value in sorted(own.items()) if value.dtype.kind == "f"}
        for is_equal in (True, False):
            for place, value in floats.items():
                equal = {match.value.index for match in self._matches.get(value.index, ())}
                left = (n for n, one in enumerate(right) if n not in found.values())
                for n in () if place in found else left:
                    other = right[n]
                    if other.index in equal or (not is_equal and _may_be(value, other)):
                        found[place] = n
                        break
        return found

    def forward(self) -> Iterator[Requirement]:
        """Yields what the forward pass must make equal."""
        for key, calls in self.calls.items():
            for call in calls:
                yield from self._entering(key, call)
                yield from self._returned(key, call)

    def _entering(self, key: PairKey, call: PairCall) -> Iterator[Requirement]:
        if self.is_outermost(key):
            return
        for path, own in zip(call.pair.candidate, call.own, strict=True):
            owner, within = self.place_of(key, path)
            for place, n in call.entered.items():
                value = own.entered.get(place)
                if value is None:
                    continue
                is_bias = own.names.get(place) == "position_bias"
                name = f"the position_bias of {within}" if is_bias else f"{INPUT_OF}{within}"
                wanted = self._as_large(call.right[0].entered[n], value)
                yield Requirement(owner, name, [value], wanted)

    def _returned(self, key: PairKey, call: PairCall) -> Iterator[Requirement]:
        for place, own in enumerate(call.own):
            for n, other in call.returned[place].items():
                value = own.returned[n]
                wanted = self.wanted(call, place, [c.returned[other] for c in call.right])
                yield Requirement(key, "its output", [value], self._as_large(wanted, value))

    def wanted(self, call: PairCall, place: int, results: Sequence[Value]) -> Value:
        """Returns what a module of the candidate must return: the reference's, or a part of it.

        Args:
            call: of the pair.
            place: of the module in the pair.
            results: what the reference's modules return, or the gradients of that.
        """
        if call.pair.packing is ONE_TO_ONE:
            return results[0]
        cut = self.cut(call, place)
        width = call.own[place].returned[0].shape[-1]
        return self.tapes[1].derive("slice", list(results), (*results[0].shape[:-1], width), cut)

    def cut(self, call: PairCall, place: int) -> Callable[..., np.ndarray]:
        """Returns what makes of the reference's results what a module of the candidate returns."""
        if call.pair.packing is ONE_TO_ONE:
            return lambda *arrays: arrays[0]
        share = self._share(call.pair, place, call.own, call.right)
        assert share is not None

        def cut(*arrays: np.ndarray) -> np.ndarray:
            joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, -1)
            return joined[..., share]

        return cut

    def _as_large(self, wanted: Value, value: Value) -> Value:
        """Returns a value of the reference, or its first example if the candidate has just one."""
        if wanted.size == value.size:
            return wanted

        shape = (1, *wanted.shape[1:])
        return self.tapes[1].derive("slice", [wanted], shape, lambda array: array[:1])


def calls_of(marks: Sequence[tuple[Mark, Value]]) -> dict[str, list[OwnCall]]:
    """Returns the calls of each module, in the order of the run.

    What is traced once may run several times, as the step of a scan does.
    """
    found: dict[str, dict[tuple[int, int], OwnCall]] = defaultdict(dict)
    for mark, time, value in _timed(marks):
        call = found[mark.path].setdefault(
            (time, mark.number), OwnCall(mark.path, mark.number, time)
        )
        getattr(call, mark.side)[mark.place] = value
        if mark.name:
            call.names[mark.place] = mark.name
    return {path: list(calls.values()) for path, calls in found.items()}


def _timed(marks: Sequence[tuple[Mark, Value]]) -> Iterator[tuple[Mark, int, Value]]:
    """Yields marks with their values, and how many times each was run before."""
    times: dict[Mark, int] = defaultdict(int)
    for mark, value in marks:
        yield mark, times[mark], value
        times[mark] += 1


def _may_be(value: Value, other: Value) -> bool:
    """Returns whether a value may be one of the reference, or its first example, by its shape."""
    if value.size == other.size:
        return True
    is_first = len(value.shape) > 1 and value.shape[:1] == (1,)
    return is_first and value.shape[1:] == other.shape[1:]


def _describe_counts(counts: set[int]) -> str:
    return " or ".join(str(n) for n in sorted(counts)) + (" times" if counts != {1} else " time")
