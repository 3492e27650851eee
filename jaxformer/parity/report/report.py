"""The report of a comparison by modules: plain data, its JSON form, and how it shows itself."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxformer.parity.report.html.writer import page
from jaxformer.parity.report.model import (
    VERDICTS,
    AttentionMaps,
    Difference,
    Histogram,
    Node,
    SettingDifference,
    Step,
    Verdict,
)
from jaxformer.parity.report.tables import make_dataframe
from jaxformer.parity.report.terminal import as_text
from jaxformer.parity.report.text import verdict_line

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
# What ``print`` shows: two screens.
MOST_LINES = 96


@dataclasses.dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        return f"<Report of {len(self.nodes)} modules: {verdict_line(self)}>"

    def __str__(self) -> str:
        return as_text(self, MOST_LINES)

    def _repr_html_(self) -> str:
        """Returns the report as a page, for a notebook."""
        return page(self)

    def to_dataframe(self) -> Any:
        """Returns the nodes as a table of pandas, one row each.

        Raises:
            UsageError: pandas is not installed.
        """
        names = ["path", "reference_path", "kind", "reference_kind", "verdict", "is_root_cause"]
        rows = [
            [getattr(node, name) for name in names]
            + ([node.worst.error, node.worst.relative] if node.worst else [None, None])
            for node in self.nodes
        ]
        return make_dataframe(rows, [*names, "error", "relative_error"])


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
