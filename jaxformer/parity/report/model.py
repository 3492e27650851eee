"""What a comparison found: plain data, that the terminal, JSON and HTML reports are made of."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

FORMAT = 1
Verdict = Literal["exact", "rounding", "amplified", "bug"]
Stage = Literal["", "parameters", "forward", "backward"]
# From good to bad.
VERDICTS: tuple[Verdict, ...] = ("exact", "rounding", "amplified", "bug")


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one array of ours is from theirs.

    Attributes:
        error: largest |ours - theirs|, both computed in float64.
        scale: largest |theirs|.
        allowed: the largest error that is rounding; see ``judge``.
        candidate_rounding: root mean square of (candidate in the dtype under test - reference in
            float64), over the root mean square of the reference; None where it was not measured.
        reference_rounding: the same of theirs in the dtype under test.
        ulps: our largest error in the dtype under test, in units in the last place of ``scale``.
    """

    error: float
    scale: float
    allowed: float
    candidate_rounding: float | None = None
    reference_rounding: float | None = None
    ulps: float | None = None

    @property
    def relative(self) -> float:
        """The error over the scale; infinite where something should be zero and is not."""
        if self.error == 0:
            return 0.0
        return self.error / self.scale if self.scale else float("inf")

    @property
    def is_bug(self) -> bool:
        """Whether the error is more than rounding."""
        return not self.error <= self.allowed

    @property
    def excess(self) -> float:
        """The error over what is allowed; infinite where nothing is, or the error is NaN."""
        if self.error == 0:
            return 0.0
        excess = self.error / self.allowed if self.allowed else float("inf")
        return excess if excess == excess else float("inf")


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How the values of an output are spread, on both sides: one more edge than counts."""

    edges: tuple[float, ...]
    candidate: tuple[int, ...]
    reference: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AttentionMaps:
    """Attention weights of one example, head by head, both sides: (heads, T, S), nested tuples."""

    candidate: Any
    reference: Any


@dataclasses.dataclass(frozen=True)
class Node:
    """One pair of modules.

    Attributes:
        path: ours, "" for the whole model; several, joined by " + ", where one of theirs has them.
        reference_path: theirs.
        kind: our class.
        reference_kind: theirs.
        depth: how many pairs of modules are around it.
        order: its place in the order of calls.
        verdict: the worst of all that was compared.
        stage: where the bug shows first: parameters, forward or backward; "" where there is none.
        message: what is wrong and where to look, in a sentence; "" where nothing is.
        is_root_cause: whether the bug is here, and not in a part of it.
        parameters: of each of its own parameters, ours against theirs.
        forward: of its output, run on their inputs.
        in_context: of its output as it came out of the whole model.
        backward: of each gradient, run on their inputs and output gradient: ``input 0`` …,
            and parameters by name.
        condition: how much larger the relative error of its output is than that of its input, in
            the dtype under test; None where it was not measured.
        histogram: of its output.
        maps: of its attention weights, where it has such.
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
        """All that the node is judged by, under the names that reports give them."""
        forward = {} if self.forward is None else {"output": self.forward}
        backward = {f"gradient of {name}": one for name, one in self.backward.items()}
        parameters = {f"parameter {name}": one for name, one in self.parameters.items()}
        return {**parameters, **forward, **backward}

    @property
    def worst(self) -> Difference | None:
        """Of what it is judged by, that which is nearest to a bug, or furthest beyond.

        Where there is a bug, of the stage where it shows first. Its output in the whole model
        counts where nothing else was measured: it also holds what came in.
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
    """A setting that is not the same on both sides, and what that is likely to do."""

    name: str
    candidate: str
    reference: str
    effect: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of training, or one generated token.

    Attributes:
        number: from 0.
        candidate: our loss, or our token.
        reference: theirs.
        difference: of the losses, or of the logits.
        note: "tie" where the two best logits are closer than the error.
        worst: the parameter that differs most, relative to what is allowed.
    """

    number: int
    candidate: float
    reference: float
    difference: Difference
    note: str = ""
    worst: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """A comparison of two models.

    Attributes:
        mode: forward, grad, train or generate.
        dtype: under test, beside float64.
        nodes: in the order of calls, a parent before its parts.
        settings: what differs before anything is run.
        steps: of training or generation.
        about: what was compared, with what: paths, versions, flags, input shapes, seconds.
        remarks: what several nodes together show, a sentence each: two layers look swapped.
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
        """Where the bugs are, in the order of calls."""
        return tuple(node for node in self.nodes if node.is_root_cause)

    @property
    def first_divergence(self) -> Step | None:
        """The first step at which the two part by more than rounding, ties apart."""
        return next((s for s in self.steps if s.difference.is_bug and s.note != "tie"), None)

    @property
    def verdict(self) -> Verdict:
        """The worst of all."""
        if self.first_divergence is not None:
            return "bug"
        found: list[Verdict] = [node.verdict for node in self.nodes]
        found += ["rounding" if step.difference.error else "exact" for step in self.steps]
        return max(found, key=VERDICTS.index, default="exact")

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON."""
        return {"format": FORMAT, "verdict": self.verdict, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """As JSON, numbers that are not finite as strings."""
        return json.dumps(_plain(self.to_dict()), indent=1, default=str)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Report":
        """The inverse of ``to_dict``.

        Raises:
            ValueError: it is no report, or one of another format.
        """
        if values.get("format") != FORMAT:
            raise ValueError(f"this is no parity report of format {FORMAT}")
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
    """Nested tuples of floats; what is not finite was written as a string."""
    return tuple(map(_floats, values)) if isinstance(values, list | tuple) else float(values)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
