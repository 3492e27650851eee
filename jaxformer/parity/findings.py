"""What a comparison found of one module, setting or step, as plain data: a report is made of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Verdict = Literal["exact", "rounding", "amplified", "incomplete", "bug"]
Stage = Literal["", "parameters", "forward", "backward"]
# From good to bad.
VERDICTS: tuple[Verdict, ...] = ("exact", "rounding", "amplified", "incomplete", "bug")
# What a difference of what enters a submodule is called, with its path.
INPUT_OF = "the input of "
# Root causes above this share of scale are listed first.
SEVERE = 1e-3


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one array of the candidate is from that of the reference.

    Attributes:
        error: largest |candidate - reference|, both computed in float64.
        scale: largest |reference|.
        allowed: the largest error that counts as rounding; see ``judge``.
        candidate_rounding: root mean square of (candidate in the dtype under test - reference in
            float64), over the root mean square of the reference; None where it was not measured.
        reference_rounding: the same of the reference in the dtype under test.
        ulps: largest error of the candidate in the dtype under test, in units in the last place of
            ``scale``.
    """

    error: float
    scale: float
    allowed: float
    candidate_rounding: float | None = None
    reference_rounding: float | None = None
    ulps: float | None = None

    @property
    def relative(self) -> float:
        """The error over the scale; infinite if what should be zero is not."""
        if self.error == 0:
            return 0.0
        return self.error / self.scale if self.scale else float("inf")

    @property
    def is_bug(self) -> bool:
        """Whether the error is more than rounding."""
        return not self.error <= self.allowed

    @property
    def excess(self) -> float:
        """The error over what is allowed; infinite if nothing is allowed or the error is NaN."""
        if self.error == 0:
            return 0.0
        excess = self.error / self.allowed if self.allowed else float("inf")
        return excess if excess == excess else float("inf")


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How many values of an output lie between two edges, on both sides.

    Attributes:
        edges: ascending; one more than there are counts.
        candidate: counts.
        reference: counts.
    """

    edges: tuple[float, ...]
    candidate: tuple[int, ...]
    reference: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AttentionMaps:
    """Attention weights of one example on both sides: (heads, T, S), as nested tuples."""

    candidate: Any
    reference: Any


@dataclasses.dataclass(frozen=True)
class Node:
    """One pair of matched modules and what was measured of them.

    Attributes:
        path: of the candidate, "" for the whole model; several paths joined by " + " where one
            module of the reference corresponds to several of the candidate.
        reference_path: of the reference.
        kind: class of the candidate's module.
        reference_kind: class of the reference's module.
        depth: how many pairs of modules enclose it.
        order: its place in the order of calls.
        verdict: the worst of all that was compared.
        stage: where the bug shows first: parameters, forward or backward; "" without a bug.
        message: what is wrong and where to look, in a sentence; "" if nothing is wrong.
        is_root_cause: whether the bug is in this module itself, and not in one inside it.
        parameters: differences of its own parameters, by name.
        forward: difference of its output, when it is run on the reference's inputs.
        in_context: difference of its output in the whole model.
        backward: differences of gradients, when it is run on the reference's inputs and output
            gradient: ``input 0`` …, and parameters by name.
        condition: how much larger the relative error of its output is than that of its input, in
            the dtype under test; None where it was not measured.
        histogram: of its output.
        maps: its attention weights, if it has any.
        wrong_after: the submodule that gets the last right input before it goes wrong itself, by
            its path within it; "" if there is none.
    """

    path: str
    reference_path: str
    kind: str
    reference_kind: str
    depth: int
    order: int
    verdict: Verdict = "exact"
    stage: Stage = ""
    message: str = ""
    is_root_cause: bool = False
    parameters: Mapping[str, Difference] = dataclasses.field(default_factory=dict)
    forward: Difference | None = None
    in_context: Difference | None = None
    backward: Mapping[str, Difference] = dataclasses.field(default_factory=dict)
    condition: float | None = None
    histogram: Histogram | None = None
    maps: AttentionMaps | None = None
    wrong_after: str = ""

    @property
    def differences(self) -> dict[str, Difference]:
        """All differences that the node is judged by, under the names that reports show."""
        forward = {} if self.forward is None else {"output": self.forward}
        backward = {f"gradient of {name}": one for name, one in self.backward.items()}
        parameters = {f"parameter {name}": one for name, one in self.parameters.items()}
        return {**parameters, **forward, **backward}

    @property
    def worst(self) -> Difference | None:
        """The difference with the largest excess over what is allowed; None without any.

        With a bug, only the stage where it shows first counts. The output in the whole model counts
        only if nothing else was measured, because it also holds the errors of earlier modules.
        """
        stages = {
            "parameters": [*self.parameters.values()],
            "forward": [] if self.forward is None else [self.forward],
            "backward": [*self.backward.values()],
        }
        measured = stages.get(self.stage) or [*self.differences.values()]
        if not measured and self.in_context is not None:
            measured = [self.in_context]
        return max(measured, key=lambda d: (d.excess, d.relative), default=None)

    @property
    def ulps(self) -> float | None:
        """The largest error in the dtype under test, in units in the last place."""
        measured = [*self.differences.values()] + [d for d in (self.in_context,) if d is not None]
        return max((d.ulps for d in measured if d.ulps is not None), default=None)


@dataclasses.dataclass(frozen=True)
class RootCause:
    """One place where the candidate computes something else than the reference.

    Attributes:
        jax_source: "path:line" of the candidate's code; "" where it is not known.
        torch_source: "path:line" of the reference's code.
        diagnosis: what would make it right; "" if nothing that was tried does.
        error: the largest difference, as a share of the largest number of the right result.
        stage: where it shows first.
        jax_operators: names of the primitives that compute something else, in order.
        torch_operators: names of the reference's ATen operators in their place.
        jax_module: the candidate's module; "" for the whole model, or where its framework gives no
            names.
        torch_module: path of the reference's module.
        places: how many times the same line is wrong in the same way, as in each layer.
        effect: how far it moves the results if all else is right, of their scale; None where that
            is not known.
        jax_after: "path:line" of the code that made what the candidate's line reads. A step that is
            missing has no line: it belongs between the two.
        node: the pair of modules that it is in, where modules were paired.
        candidate_path: of the candidate's module, where the user gave names; else "".
    """

    jax_source: str = ""
    torch_source: str = ""
    diagnosis: str = ""
    error: float = 0.0
    stage: Stage = "forward"
    jax_operators: tuple[str, ...] = ()
    torch_operators: tuple[str, ...] = ()
    jax_module: str = ""
    torch_module: str = ""
    places: int = 1
    effect: float | None = None
    jax_after: str = ""
    node: Node | None = None
    candidate_path: str = ""

    @property
    def path(self) -> str:
        """Path of the candidate's module, as its node or the user has it; else the reference's."""
        if self.node is not None:
            return self.node.path
        return self.candidate_path or self.torch_module

    @property
    def reference_path(self) -> str:
        """Path of the reference's module."""
        return self.torch_module if self.node is None else self.node.reference_path

    @property
    def message(self) -> str:
        """What is wrong, in a sentence."""
        diagnosis = self.diagnosis or "the two sides compute something else"
        return diagnosis if self.node is None else self.node.message

    def __getattr__(self, name: str) -> Any:
        """Returns what else its node has, such as ``worst`` and ``forward``."""
        node = self.__dict__.get("node")
        if node is None:
            raise AttributeError(name)
        return getattr(node, name)

    @property
    def is_backward(self) -> bool:
        """Whether the gradient is wrong where the result is right."""
        return self.stage == "backward"

    @property
    def is_severe(self) -> bool:
        """Whether it is listed before those that hardly matter."""
        # NaN is severe.
        return not (self.error if self.effect is None else self.effect) < SEVERE


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much was compared. Each pair of numbers says how many were, and how many there are.

    What was not counted is None: values where modules are paired, and not every framework says
    which of its modules computes a value.

    Attributes:
        modules: of the reference, of those that were called. Where modules are paired, those whose
            pair was run by itself; the others were compared as parts of the modules around them.
            Else those whose output a value of the candidate equals or was put right to equal.
        candidate_modules: the same of the candidate; where modules are not paired, those that made
            a value which equals one of the reference.
        parameters: of the candidate: those that were found in the reference.
        reference_parameters: those that were found in the candidate.
        operators: of the reference, of those that read a parameter: those that were compared with
            one of the candidate that reads the same.
        candidate_operators: the same of the candidate.
        values: floats of the candidate that equal a value of the reference.
        gradients: of the candidate's parameters, and where operators were compared of its float
            inputs too; (0, 0) if there was no backward pass.
        error: the largest difference of an equal value, as a share of its largest number.
    """

    modules: tuple[int, int]
    parameters: tuple[int, int]
    operators: tuple[int, int] | None = None
    values: tuple[int, int] | None = None
    gradients: tuple[int, int] = (0, 0)
    error: float = 0.0
    candidate_modules: tuple[int, int] | None = None
    reference_parameters: tuple[int, int] | None = None
    candidate_operators: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class SettingDifference:
    """A setting that differs between the two sides, and the likely effect."""

    name: str
    candidate: str
    reference: str
    effect: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of training, or one generated token.

    Attributes:
        number: from 0.
        candidate: the candidate's loss, or its token.
        reference: the reference's loss, or its token.
        difference: of the losses, of the logits, or of the parameter ``worst``.
        note: "tie" where the two best logits are closer than the error.
        worst: path of the parameter that differs most, relative to what is allowed.
        of_parameter: whether the losses are equal, and the difference is that of ``worst`` after
            the update.
    """

    number: int
    candidate: float
    reference: float
    difference: Difference
    note: str = ""
    worst: str = ""
    of_parameter: bool = False
