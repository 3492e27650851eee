"""Compares the backward passes of the two sides, on the same tapes as the forward ones.

Both sides are given the same cotangents, random numbers, for each result that was compared. The
operators of the backward pass are recorded and walked through like those of the forward pass, from
what the forward pass was put right to. What must be equal at the end is the gradient of each
parameter and of each input of floats.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from jaxformer.parity.matching.layouts import Layout, find_layout
from jaxformer.parity.matching.parameters import ParameterMatches
from jaxformer.parity.matching.parts import assemble, find_pieces
from jaxformer.parity.matching.reference_attention import ReferenceAttention
from jaxformer.parity.matching.values import rounding_allowed
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.jax_run import JaxRun
from jaxformer.parity.recording.operators.torch_run import TorchRun
from jaxformer.parity.segments.backward_runs import run_backward
from jaxformer.parity.segments.frozen_parameters import FrozenParameters
from jaxformer.parity.segments.padding_rows import describe_padding_rows, without_row
from jaxformer.parity.segments.results import Results
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.words import listed

# Code that masks by adding a large number differs there from code that selects one.
IDLE = (
    "no gradient is sent back from the results at tokens that may attend to none: what they get "
    "from each other is arbitrary"
)


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What became of the gradients.

    Attributes:
        compared: how many gradients of the candidate's parameters and float inputs were compared.
        expected: how many there are.
        remarks: why the others had not.
        right: those of the reference's parameters, by path.
    """

    compared: int = 0
    expected: int = 0
    remarks: tuple[str, ...] = ()
    right: Mapping[str, Value] = dataclasses.field(default_factory=dict)


def compare_gradients(
    reference: TorchRun, candidate: JaxRun, walk: Walk, results: Results,
    parameters: ParameterMatches,
) -> Gradients:  # fmt: skip
    """Records both backward passes and walks through them.

    Args:
        reference: after its forward pass.
        candidate: after its forward pass.
        walk: after the forward pass, with its corrections kept.
        results: those that were compared.
        parameters: which parameters are equal.
    """
    idle = ReferenceAttention(reference.softmaxes).idle(-1, len(reference.tape.operators))
    is_left_out = False

    def without_idle(cotangent: np.ndarray) -> np.ndarray:
        nonlocal is_left_out
        if idle is not None and cotangent.shape[:2] == idle.shape and cotangent[idle].any():
            cotangent[idle] = 0.0
            is_left_out = True
        return cotangent

    made = run_backward(reference, candidate, walk, results, without_idle)
    if isinstance(made, str):
        return Gradients(remarks=(f"gradients were not compared: {made}",))
    walk.advance_backward()
    found = _Comparison(walk, parameters, *made, reference).run()
    return dataclasses.replace(found, remarks=(*found.remarks, IDLE)) if is_left_out else found


class _Comparison:
    """Requires each gradient of the candidate to be what the reference's gradients make it."""

    def __init__(
        self,
        walk: Walk,
        parameters: ParameterMatches,
        right: Mapping[int, Value],
        own: Mapping[int, Value],
        reference: TorchRun,
    ):
        self._walk, self._parameters = walk, parameters
        named = [*walk.reference.parameters.values(), *walk.reference.buffers.values()]
        self._sources = {v.name: v for v in named if v.index in right}
        self._right = {name: right[v.index] for name, v in self._sources.items()}
        self._right_of_inputs = {
            v.index: right[v.index] for v in walk.reference.inputs if v.index in right
        }
        self._own = own
        self._padding_rows = reference.padding_rows
        self._trained_rows: dict[str, int] = {}
        self._frozen = FrozenParameters(reference.frozen)
        self._left: list[str] = []
        self._compared = 0
        self._layouts: dict[tuple[str, str], Layout | None] = {
            (wrong.reference, wrong.candidate): wrong.layout for wrong in parameters.wrong
        }

    def run(self) -> Gradients:
        """Goes through parameters and inputs."""
        groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
        # One that has no effect is reported as such; that its gradient is zero says no more.
        needed = self._walk.candidate.ancestors(self._walk.candidate.outputs)
        has_effect = {n for n, v in self._walk.candidate.parameters.items() if v.index in needed}
        for name, twins in self._parameters.whole.items():
            groups[tuple(n for n in twins if n in self._right)].append(name)
        for wrong in self._parameters.wrong:
            groups[wrong.reference,].append(wrong.candidate)
        buffers = []
        for twins, names in groups.items():
            names = [name for name in names if name in has_effect]
            if self._frozen.are_all(twins):
                self._compare_frozen(names)
            elif twins and names:
                self._compare_group(twins, names)
            else:
                buffers += names
        for name, owners in self._parameters.in_parts.items():
            if name in has_effect:
                self._compare_parts(name, owners)
        for value in self._walk.candidate.inputs:
            self._compare_input(value)
        self._left += [name for name in self._parameters.unmatched if name in has_effect]
        remarks = [
            _not_compared(
                self._left,
                "because none or several parameters of the reference have the same numbers in the "
                "same order",
            ),
            _not_compared(
                buffers, "because the reference has these numbers in buffers without gradients"
            ),
            self._without_gradients(),
            describe_padding_rows(self._walk.reference, self._trained_rows),
            *self._frozen.remarks(),
        ]
        count = self._compared + len(self._left) + len(buffers) + len(self._frozen.inputs)
        return Gradients(self._compared, count, tuple(filter(None, remarks)), self._right)

    def _without_gradients(self) -> str:
        """Returns which parameters of the reference are none of the candidate, "" if all are."""
        tape = self._walk.reference
        needed = tape.ancestors(tape.outputs)
        names = [n for n in self._parameters.missing if tape.parameters[n].index in needed]
        if not names:
            return ""
        what = "parameter" if len(names) == 1 else "parameters"
        return (
            f"the candidate has no gradient for {len(names)} {what} of the reference, whose "
            f"numbers are in none of its own: {listed(names)}"
        )

    def _gradient(self, name: str) -> Value:
        return self._own[self._walk.candidate.parameters[name].index]

    def _compare_frozen(self, names: Sequence[str]) -> None:
        for name in names:
            is_stopped = not self._walk.array(self._gradient(name)).any()
            self._compared += is_stopped
            self._frozen.note(name, is_stopped)

    def _compare_group(self, twins: Sequence[str], names: Sequence[str]) -> None:
        """Compares the gradients of parameters with the same numbers."""
        # The same numbers may be in another order, such as that of other heads.
        turned = [n for n in names if all(self._layout(twin, n) is None for twin in twins)]
        self._left += turned
        names = [name for name in names if name not in turned]
        if not names:
            return
        own = {name: self._gradient(name) for name in names}
        if all(twin in self._walk.reference.buffers for twin in twins):
            # The reference does not train a buffer; nor does a candidate that stops its gradient.
            still = [n for n, value in own.items() if not self._walk.array(value).any()]
            self._compared += len(still)
            own = {name: value for name, value in own.items() if name not in still}
            names = list(own)
            if not own:
                return
        if len(twins) == 1 and len(names) > 1:
            is_plain = self._walk.index.is_one_number(self._sources[twins[0]])
            equal = [
                name
                for name in names
                if is_plain and self._equals(own[name], self._right[twins[0]])
            ]
            if equal:
                # Zeros or ones are in many places: the others are a buffer's, or parts of others.
                self._compared += 1
                self._left += [name for name in names if name != equal[0]]
                return
            # One parameter of the reference, several copies in the candidate: their sum counts.
            layouts = [one for name in names if (one := self._layout(twins[0], name)) is not None]
            right = self._right[twins[0]]
            self._require(self._sum(list(own.values()), layouts, right.shape), right)
            return
        left = list(twins)
        if len(twins) > 1:
            # Vectors of ones, as a rule: their gradients tell which is which.
            for name in names:
                twin = next((t for t in left if self._equals(own[name], self._right[t])), None)
                if twin is not None:
                    left.remove(twin)
                    del own[name]
                    self._compared += 1
            if self._frozen.are_all(left):
                self._compare_frozen(list(own))
                return
        layout = self._layout(left[0], next(iter(own))) if len(own) == len(left) == 1 else None
        if layout is None:
            self._left += own
        else:
            ((_, value),) = own.items()
            right = self._right_gradient(left[0], value, layout)
            if self._is_match(value, right, layout):
                self._compared += 1
            else:
                self._require(value, self._derive("layout", [right], layout.apply))

    def _is_match(self, own: Value, right: Value, layout: Layout) -> bool:
        """Returns whether a value is known to be one of the reference, in this layout."""
        found = self._walk.matches.get(own.index, ())
        return any(match.value is right and match.layout == layout for match in found)

    def _right_gradient(self, twin: str, own: Value, layout: Layout) -> Value:
        """Returns the gradient of a parameter, without a padding token's if the candidate has none.

        Where the candidate trains that row, the reference's is what it would be.
        """
        right, row = self._right[twin], self._padding_rows.get(twin)
        if row is None:
            return right
        array = layout.invert(self._walk.array(own), right.shape)
        if array[row].any():
            self._trained_rows[twin] = row
            return right
        return self._derive("row", [right], lambda gradient: without_row(gradient, row))

    def _equals(self, own: Value, right: Value) -> bool:
        if any(match.value is right for match in self._walk.matches.get(own.index, ())):
            return True
        array = self._walk.array(own)
        return own.size == right.size and (
            find_layout(right.data, array, rounding_allowed(right.data)) is not None
        )

    def _layout(self, twin: str, name: str) -> Layout | None:
        """Returns the layout from a parameter of the reference to one of the candidate, if any."""
        if (twin, name) not in self._layouts:
            source, target = self._sources[twin], self._walk.candidate.parameters[name]
            known = [m for m in self._walk.matches.get(target.index, ()) if m.value is source]
            self._layouts[twin, name] = known[0].layout if known else _layout(source, target)
        return self._layouts[twin, name]

    def _sum(
        self, gradients: Sequence[Value], layouts: Sequence[Layout], shape: tuple[int, ...]
    ) -> Value:
        """Returns the sum of gradients of the candidate, in the layout of the reference."""

        def add(*arrays: np.ndarray) -> list[np.ndarray]:
            pairs = zip(arrays, layouts, strict=True)
            return [sum((layout.invert(array, shape) for array, layout in pairs), np.zeros(()))]

        walk = self._walk
        made = add(*map(walk.array, gradients))
        return walk.candidate.record("add", list(gradients), made, add)[0]

    def _compare_parts(self, name: str, owners: Collection[str]) -> None:
        """Compares the gradient of a parameter that is made of parts of others."""
        own, walk = self._gradient(name), self._walk
        names = [n for n in owners if n in self._right]
        if self._frozen.are_all(names):
            self._compare_frozen([name])
            return
        sources = {n: self._sources[n].data for n in names}
        pieces = find_pieces(walk.candidate.parameters[name].data, sources)
        if pieces is None:
            # Zeros, say, are in many places.
            self._left.append(name)
            return
        shape = own.shape

        def put_together(*arrays: np.ndarray) -> np.ndarray:
            given = {n: 0 * a if n in stopped else a for n, a in zip(names, arrays, strict=True)}
            return assemble(shape, pieces, given)

        def marks(frozen: str) -> np.ndarray:
            arrays = {n: np.full(array.shape, float(n == frozen)) for n, array in sources.items()}
            return assemble(shape, pieces, arrays) > 0

        stopped = self._frozen.stopped_parts(names, walk.array(own), marks)
        self._require(own, self._derive("parts", [self._right[n] for n in names], put_together))

    def _compare_input(self, value: Value) -> None:
        own = self._own.get(value.index)
        twins = [
            m.value
            for m in self._walk.matches.get(value.index, ())
            if m.value.index in self._right_of_inputs
        ]
        if own is None or not twins:
            return
        # Several inputs may hold the same numbers: keys and values that begin as zeros, or a source
        # that is the target too. The one of the same name is meant, where there is one.
        named = [one for one in twins if one.name == value.name]
        right = [self._right_of_inputs[one.index] for one in named or twins]
        if len({one.shape for one in twins}) == 1 < len(twins):
            # The candidate may have one input for all of them.
            every = [self._right_of_inputs[one.index] for one in twins]
            right.append(self._derive("add", every, lambda *arrays: np.sum(arrays, axis=0)))
        equal = next((one for one in right if self._equals(own, one)), None)
        if self._frozen.has_stops and equal is None:
            self._frozen.inputs.append(value.name)
        else:
            self._require(own, right[0] if equal is None else equal)

    def _derive(self, name: str, values: Sequence[Value], make: Callable[..., np.ndarray]) -> Value:
        """Returns a value that is made of others of the reference."""
        reference = self._walk.reference
        made = [make(*(value.data for value in values))]
        return reference.record(name, list(values), made, lambda *arrays: [make(*arrays)])[0]

    def _require(self, own: Value, right: Value) -> None:
        self._walk.require(own, right)
        self._compared += 1


def _layout(source: Value, target: Value) -> Layout | None:
    """Returns the layout in which two values are equal, if any."""
    found = find_layout(source.data, target.data, rounding_allowed(source.data))
    return None if found is None else found[0]


def _not_compared(names: Sequence[str], reason: str) -> str:
    """Returns how many gradients were not compared, and why; "" if there are none."""
    if not names:
        return ""
    what = "gradient was" if len(names) == 1 else "gradients were"
    return f"{len(names)} {what} not compared, {reason}: {listed(names)}"
