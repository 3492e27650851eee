"""What gradients must be where it is known which modules of the two sides are the same."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.known_modules import (
    KnownModules,
    OwnCall,
    PairCall,
    Requirement,
    calls_of,
)
from jaxformer.parity.matching.known_parameters import layout_of
from jaxformer.parity.matching.pairs import PairKey
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.module_marks import Mark
from jaxformer.parity.recording.operators.torch_calls import ModuleCall
from jaxformer.parity.recording.operators.torch_run import TorchRun
from jaxformer.porting.mapping.packings import ONE_TO_ONE
from jaxformer.porting.mapping.rules import Link

# The side, path, number and place of a mark.
Place = tuple[str, str, int, int]


class KnownGradients:
    """What comes back to modules, and what must come back to them.

    Where a module lets no gradient through, less comes back to those around it: they are put right
    and not judged. Nothing is known of those to which nothing comes back.

    Args:
        known: the modules, after the forward pass.
        cotangents: values of the candidate with the mark of a cotangent.
        differentiated: the marks on values that gradients depend on.

    Attributes:
        stopped: pairs through which no gradient comes back though the reference's does.
        lossy: pairs to which less of a gradient comes back, because of a module inside of them.
        unreached: pairs to which no gradient comes back though the reference's does.
    """

    def __init__(
        self,
        known: KnownModules,
        cotangents: Sequence[tuple[Mark, Value]],
        differentiated: Iterable[Mark],
    ):
        self._known = known
        made = calls_of(cotangents)
        self._back = {(c.path, c.number, c.time): c for each in made.values() for c in each}
        self._marks: set[Place] = {(m.side, m.path, m.number, m.place) for m in differentiated}
        self.stopped: set[PairKey] = set()
        self.lossy: set[PairKey] = set()
        self.unreached: set[PairKey] = set()

    def of_modules(self) -> list[Requirement]:
        """Returns what the gradients of what enters and leaves modules must be."""
        known = self._known
        found: list[Requirement] = []
        stopping: set[PairKey] = set()
        for key, calls in known.calls.items():
            # Where the reference calls a module once, all calls of the candidate are that one.
            together = len(calls) > 1 and all(call.right == calls[0].right for call in calls)
            for group in [calls] if together else [[call] for call in calls]:
                if known.is_outermost(key):
                    found += [*self._of_results(key, group), *self._of_entered(key, group)]
                else:
                    found += self._of_group(key, group, stopping)
        # A module stops what a module inside of it stops.
        inner = {key for key in stopping if not any(known.is_in(one, key) for one in stopping)}
        self.unreached -= inner
        for key in inner:
            for call in known.calls[key]:
                found += self._of_entered(key, [call])
        self.stopped |= inner
        stops = {key for key in self.stopped | stopping if not known.is_outermost(key)}
        self.lossy |= {*map(known.around, stops)} - inner
        for one in found:
            is_lost = not one.values and one.owner in self.unreached
            one.is_known = one.owner not in self.lossy and not is_lost
        return found

    def _of_results(self, key: PairKey, group: Sequence[PairCall]) -> Iterator[Requirement]:
        """Yields what must come back to the results of the whole model, if it lets nothing through.

        What comes back to them is given.
        """
        for one, places in self._of_returned(key, group):
            if not one.values and one.wanted.data.any() and self._marks.isdisjoint(places):
                self.stopped.add(key)
                yield dataclasses.replace(one, owner=key, name="its output")

    def _of_group(
        self, key: PairKey, group: Sequence[PairCall], stopping: set[PairKey]
    ) -> Iterator[Requirement]:
        """Yields what the gradients of calls that are one of the reference must be.

        Args:
            key: of the pair.
            group: its calls.
            stopping: gets the pair if its code, or that of one inside of it, stops gradients.
        """
        returned = [*self._of_returned(key, group)]
        yield from (one for one, _ in returned if one.values)
        if key in self._known.answered:
            return
        lacking = [one for one in returned if not one[0].values and one[0].wanted.data.any()]
        # Of the others the code around the module lets nothing come back.
        stopped = [one for one, places in lacking if self._marks.isdisjoint(places)]
        yield from (one for one, places in lacking if not self._marks.isdisjoint(places))
        if lacking and len(lacking) == len(returned):
            self.unreached.add(key)
            stopping |= {key} if stopped else set()
            return
        # One of several modules that do the work of one lets nothing through.
        yield from (dataclasses.replace(one, owner=key) for one in stopped)
        self.stopped |= {key} if stopped else set()
        yield from self._of_entered(key, group)

    def _came_back(self, call: OwnCall) -> OwnCall:
        """Returns the values with the marks of a call in the backward pass: last comes first."""
        last = max(one.time for one in self._known.own[call.path] if one.number == call.number)
        place = call.path, call.number, last - call.time
        return self._back.get(place) or OwnCall(*place)

    def _of_returned(
        self,
        key: PairKey,
        group: Sequence[PairCall],
    ) -> Iterator[tuple[Requirement, set[Place]]]:
        """Yields what must be the gradients of what calls returned, and its places."""
        first = group[0]
        gradients = [call.returned_gradients for call in first.right]
        for place, path in enumerate(first.pair.candidate):
            owner, within = self._known.place_of(key, path)
            for n, other in first.returned[place].items():
                if not all(other in known for known in gradients):
                    continue
                values = [
                    value
                    for call in group
                    if (value := self._came_back(call.own[place]).returned.get(n)) is not None
                ]
                wanted = [
                    known[other] or self._zeros(call.returned[other])
                    for known, call in zip(gradients, first.right, strict=True)
                ]
                right = self._known.wanted(first, place, wanted)
                found = Requirement(owner, f"output of {within}", values, right)
                places: set[Place] = {
                    ("returned", path, call.own[place].number, n) for call in group
                }
                yield (self._as_many(found) if values else found), places

    def _of_entered(
        self,
        key: PairKey,
        group: Sequence[PairCall],
    ) -> Iterator[Requirement]:
        """Yields what must be the gradients of what entered calls."""
        first = group[0]
        gradients = [call.entered_gradients for call in first.right]
        for place, n in first.entered.items():
            if not all(n in known for known in gradients):
                continue
            values = [
                value
                for call in group
                for own in call.own
                if (value := self._came_back(own).entered.get(place)) is not None
            ]
            known = {other for each in first.returned for other in each.values()}
            parts = [
                part for call in first.right if (part := self._of_call(call, n, known)) is not None
            ]
            right = self._sum(parts) if parts else self._zeros(first.right[0].entered[n])
            found = Requirement(key, f"input {place}", values, right)
            if values:
                yield self._as_many(found)
                continue
            places = {
                ("entered", own.path, own.number, place) for call in group for own in call.own
            }
            # Else no gradient would come back whatever this module does.
            if right.data.any() and not places.isdisjoint(self._marks):
                self.stopped.add(key)
                yield found

    def _of_call(self, call: ModuleCall, n: int, known: Collection[int]) -> Value | None:
        """Returns the gradient that comes back through a call to what entered it; None for zero.

        What comes back to what the module only passes on is none of it where the candidate's module
        does not return that.

        Args:
            call: of the reference's module.
            n: the place of what entered it.
            known: places of what it returns that the candidate's returns too.
        """
        total = call.entered_gradients[n]
        later = [
            gradient
            for place, other in call.passed_on.items()
            if other == n
            and place not in known
            and (gradient := call.returned_gradients.get(place)) is not None
        ]
        if total is None or not later:
            return total
        return self._known.tapes[1].derive(
            "sub", [total, *later], total.shape, lambda first, *others: first - sum(others)
        )

    def _zeros(self, like: Value) -> Value:
        return self._known.tapes[1].add(np.zeros(like.shape), "constant")

    def _sum(self, values: Sequence[Any]) -> Value:
        """Returns the sum of values of the reference."""
        if len(values) == 1:
            return values[0]

        return self._known.tapes[1].derive(
            "add", list(values), values[0].shape, lambda *arrays: np.sum(arrays, axis=0)
        )

    def _as_many(self, found: Requirement) -> Requirement:
        """Returns a requirement of a gradient; of an only example it is the sum over all."""
        if found.wanted.size == found.values[0].size:
            return found

        wanted = self._known.tapes[1].derive(
            "reduce_sum", [found.wanted], (1, *found.wanted.shape[1:]),
            lambda array: array.sum(0, keepdims=True),
        )  # fmt: skip
        return dataclasses.replace(found, wanted=wanted)

    def of_parameters(
        self,
        links: Sequence[Link],
        reference: TorchRun,
        right: Mapping[int, Value],
        gradients: Mapping[int, Value],
    ) -> Iterator[Requirement]:
        """Yields what the gradients of parameters must be.

        Args:
            links: which arrays of both sides hold the same numbers.
            reference: after both passes.
            right: the reference's gradients, by the index of the parameter.
            gradients: the candidate's.
        """
        owners, own = self._owners_of_parameters(), self._known.tapes[0]
        places = {
            name: right[value.index]
            for name, value in {**reference.tape.parameters, **reference.tape.buffers}.items()
            if value.index in right
        }
        for link in links:
            known_names = [reference.first_names.get(name, name) for name in link.source]
            if not all(name in places for name in known_names):
                continue
            sources = [places[name] for name in known_names]
            for place, name in enumerate(link.target):
                parameter, owner = own.parameters.get(name), owners.get(name)
                if parameter is None or owner is None or parameter.index not in gradients:
                    continue

                def convert(*arrays: np.ndarray, link: Link = link, n: int = place) -> np.ndarray:
                    return link.view_as_target(list(arrays))[n]

                shape = parameter.shape
                wanted = reference.tape.derive("permute", list(sources), shape, convert)
                is_whole = link.rule.packing is ONE_TO_ONE
                same = (sources[0], layout_of(link, sources[0].shape, shape)) if is_whole else None
                short = name.removeprefix(f"{owner[0]}.") if len(owner) == 1 else name
                yield Requirement(
                    owner, short, [gradients[parameter.index]], wanted,
                    is_known=owner not in self.lossy, same=same,
                )  # fmt: skip

    def _owners_of_parameters(self) -> dict[str, PairKey]:
        """Returns the pair that answers for the gradient of each parameter of the candidate.

        There is none for those of modules to which no gradient comes back.
        """
        known = self._known
        return {
            name: pair.candidate if known.calls[pair.candidate] else known.around(pair.candidate)
            for pair in known.pairs
            if pair.candidate not in self.unreached
            for name in pair.parameters
        }
