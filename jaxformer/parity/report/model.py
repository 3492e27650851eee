"""What a comparison found, as plain data: the terminal, JSON and HTML reports show it."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

# Format 1 called the two sides "ours" and "theirs".
FORMAT = 2
FORMAT_1_KEYS = {
    "ours": "candidate",
    "theirs": "reference",
    "our_rounding": "candidate_rounding",
    "their_rounding": "reference_rounding",
    "their_path": "reference_path",
    "their_kind": "reference_kind",
    "is_culprit": "is_root_cause",
}
# The gradient of a submodule's output.
FORMAT_1_OUTPUT = re.compile(r"^what (.*) gave$")
# What holds names that a user gave, such as those of parameters: they are no keys of the format.
NAMED_BY_USER = ("parameters", "backward")
Verdict = Literal["exact", "rounding", "amplified", "bug"]
Stage = Literal["", "parameters", "forward", "backward"]
# From good to bad.
VERDICTS: tuple[Verdict, ...] = ("exact", "rounding", "amplified", "bug")


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
        difference: of the losses, or of the logits.
        note: "tie" where the two best logits are closer than the error.
        worst: path of the parameter that differs most, relative to what is allowed.
    """

    number: int
    candidate: float
    reference: float
    difference: Difference
    note: str = ""
    worst: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a comparison of two models found.

    Attributes:
        mode: forward, grad, train or generate.
        dtype: under test, beside float64.
        nodes: in the order of calls, a module before those inside it.
        settings: those that differ.
        steps: of training or generation.
        about: what was compared and how: paths, versions, flags, input shapes, seconds.
        remarks: what several nodes show together, a sentence each: two layers look swapped.
    """

    mode: str
    dtype: str
    nodes: tuple[Node, ...] = ()
    settings: tuple[SettingDifference, ...] = ()
    steps: tuple[Step, ...] = ()
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def root_causes(self) -> tuple[Node, ...]:
        """The nodes that the bugs are in, in the order of calls."""
        return tuple(node for node in self.nodes if node.is_root_cause)

    @property
    def first_divergence(self) -> Step | None:
        """The first step that differs by more than rounding and is no tie."""
        return next((s for s in self.steps if s.difference.is_bug and s.note != "tie"), None)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all nodes and steps."""
        if self.first_divergence is not None:
            return "bug"
        found: list[Verdict] = [node.verdict for node in self.nodes]
        found += ["rounding" if step.difference.error else "exact" for step in self.steps]
        return max(found, key=VERDICTS.index, default="exact")

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a plain dict, for JSON."""
        return {"format": FORMAT, "verdict": self.verdict, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """Returns the report as JSON, with numbers that are not finite as strings."""
        return json.dumps(_plain(self.to_dict()), indent=1, default=str)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Report":
        """Makes a report from what ``to_dict`` returned, in this version or one of format 1.

        Raises:
            ValueError: the values are no report, or one of an unknown format.
        """
        if values.get("format") not in (1, FORMAT):
            raise ValueError(f"this is no parity report of format 1 or {FORMAT}")
        if values["format"] == 1:
            values = _rename_format_1(values)
        try:
            return cls(
                values["mode"],
                values["dtype"],
                tuple(map(_node, values["nodes"])),
                tuple(SettingDifference(**setting) for setting in values["settings"]),
                tuple(map(_step, values["steps"])),
                values["about"],
                tuple(map(str, values.get("remarks", ()))),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"this is no parity report: {error}") from error

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)


def _rename_format_1(value: Any) -> Any:
    """Gives the keys of a report of format 1 their present names."""
    if isinstance(value, list | tuple):
        return [_rename_format_1(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        FORMAT_1_KEYS.get(key, key): {
            FORMAT_1_OUTPUT.sub(r"output of \1", name): _rename_format_1(each)
            for name, each in inner.items()
        }
        if key in NAMED_BY_USER and isinstance(inner, Mapping)
        else _rename_format_1(inner)
        for key, inner in value.items()
    }


def _node(values: Mapping[str, Any]) -> Node:
    made = dict(values)
    if made["verdict"] not in VERDICTS:
        raise ValueError(f"{made['verdict']} is no verdict")
    for name in ("forward", "in_context"):
        made[name] = _difference(values[name])
    for name in ("parameters", "backward"):
        made[name] = {key: _difference(value) for key, value in values[name].items()}
    if values["condition"] is not None:
        made["condition"] = float(values["condition"])
    if values["histogram"] is not None:
        made["histogram"] = Histogram(
            edges=tuple(map(float, values["histogram"]["edges"])),
            candidate=tuple(map(int, values["histogram"]["candidate"])),
            reference=tuple(map(int, values["histogram"]["reference"])),
        )
    if values["maps"] is not None:
        made["maps"] = AttentionMaps(
            **{side: _floats(values["maps"][side]) for side in ("candidate", "reference")}
        )
    return Node(**made)


def _step(values: Mapping[str, Any]) -> Step:
    made = {**values, "difference": _difference(values["difference"])}
    return Step(
        **{**made, "candidate": float(made["candidate"]), "reference": float(made["reference"])}
    )


def _difference(values: Mapping[str, Any] | None) -> Any:
    if values is None:
        return None
    made: dict[str, Any] = {k: v if v is None else float(v) for k, v in values.items()}
    return Difference(**made)


def _floats(values: Any) -> Any:
    """Returns nested tuples of floats; what is not finite was written as a string."""
    return tuple(map(_floats, values)) if isinstance(values, list | tuple) else float(values)


def _plain(value: Any) -> Any:
    """Returns what JSON can hold: numbers that are not finite become strings."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
