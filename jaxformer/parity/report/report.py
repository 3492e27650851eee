"""The report of a comparison: plain data, its JSON form, and how it shows itself."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxformer.parity.findings import (
    VERDICTS,
    AttentionMaps,
    Coverage,
    Difference,
    Histogram,
    Node,
    RootCause,
    SettingDifference,
    Step,
    Verdict,
)
from jaxformer.parity.report.html.writer import page
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
# Fields of a report that older ones have not.
SENTENCES = ("weights", "tables", "casts", "incomplete")
# What ``print`` shows: two screens of 25 lines.
MOST_LINES = 50


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
        remarks: what several nodes show together, or how the results were compared, a sentence
            each.
        causes: the lines of code where operators differ.
        weights: a sentence for each wrong parameter that belongs to no node.
        tables: a sentence for each constant that is only rounded to float32.
        casts: a sentence for each line that rounds to a dtype narrower than float32, which is left
            out of the comparison.
        incomplete: a sentence for each part that was not compared, and why.
        coverage: how much was compared; None of training and generation.
    """

    mode: str
    dtype: str
    nodes: tuple[Node, ...] = ()
    settings: tuple[SettingDifference, ...] = ()
    steps: tuple[Step, ...] = ()
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    causes: tuple[RootCause, ...] = ()
    weights: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    casts: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    coverage: Coverage | None = None

    @property
    def root_causes(self) -> tuple[RootCause, ...]:
        """Where the bugs are: the severe ones first, then in the order of calls."""
        # A pair of modules that was judged by itself is one cause, with what was found in it.
        named = {cause.torch_module for cause in self.causes}
        judged = {
            node.path: node
            for node in self.nodes
            if node.is_root_cause and (node.worst is not None or node.reference_path not in named)
        }
        lines = {cause.jax_module: cause for cause in reversed(self.causes)}
        found = [
            _cause_of(node, lines.get(node.path))
            for node in self._in_order_of_bugs(judged.values())
        ]
        found += [cause for cause in self.causes if cause.jax_module not in judged]
        return tuple(sorted(found, key=lambda cause: not cause.is_severe))

    def _in_order_of_bugs(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns nodes by the places of their own bugs: after what is right inside of them."""
        places = {node.path: place for place, node in enumerate(self.nodes)}

        def place_of(node: Node) -> int:
            if node.stage != "forward" or not node.wrong_after:
                return places[node.path]
            right = f"{node.path}.{node.wrong_after}".lstrip(".")
            place = places.get(right, places[node.path])
            # Up to the last of its parts; a shared head is called so much later.
            rest = itertools.islice(self.nodes, place + 1, None)
            inside = itertools.takewhile(lambda n: n.path.startswith(f"{right}."), rest)
            return place + sum(1 for _ in inside)

        return sorted(nodes, key=place_of)

    @property
    def is_by_operators(self) -> bool:
        """Whether values were matched with no names; if not, modules were compared in pairs."""
        return self.coverage is not None and self.coverage.values is not None

    @property
    def uncompared_modules(self) -> tuple[str, ...]:
        """Paths of modules of the reference without a counterpart."""
        return tuple(n.reference_path for n in self.nodes if n.verdict == "incomplete")

    @property
    def error(self) -> float:
        """The largest difference of values that count as equal, of their scale."""
        if self.coverage is not None and self.is_by_operators:
            return self.coverage.error
        worst = [node.worst for node in self.nodes if node.verdict != "bug"]
        return max((one.relative for one in worst if one is not None), default=0.0)

    @property
    def first_divergence(self) -> Step | None:
        """The first step that differs by more than rounding and is no tie."""
        return next((s for s in self.steps if s.difference.is_bug and s.note != "tie"), None)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all nodes and steps; incomplete if a part was not compared."""
        if self.causes or self.weights or self.first_divergence is not None:
            return "bug"
        # A module without a counterpart is compared as a part of the one around it.
        found: list[Verdict] = [n.verdict for n in self.nodes if n.verdict != "incomplete"]
        found += ["rounding" if step.difference.error else "exact" for step in self.steps]
        found += ["incomplete"] * bool(self.incomplete)
        if self.tables or self.casts or (self.coverage is not None and self.coverage.error):
            found.append("rounding")
        return max(found, key=VERDICTS.index, default="exact")

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a plain dict, for JSON."""
        values = dataclasses.asdict(self)
        causes = [
            {**dataclasses.asdict(dataclasses.replace(cause, node=None)), "path": cause.path}
            for cause in self.root_causes
        ]
        return {"format": FORMAT, "verdict": self.verdict, "root_causes": causes, **values}

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
                tuple(map(_cause, values.get("causes", ()))),
                coverage=_coverage(values.get("coverage")),
                **{name: tuple(map(str, values.get(name, ()))) for name in SENTENCES},
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
        """Returns a table of pandas: of the nodes, or of root causes where operators were matched.

        Raises:
            UsageError: pandas is not installed.
        """
        if self.is_by_operators:
            names = [field.name for field in dataclasses.fields(RootCause) if field.name != "node"]
            return make_dataframe(
                [[getattr(cause, name) for name in names] for cause in self.root_causes], names
            )
        names = ["path", "reference_path", "kind", "reference_kind", "verdict", "is_root_cause"]
        rows = [
            [getattr(node, name) for name in names]
            + ([node.worst.error, node.worst.relative] if node.worst else [None, None])
            for node in self.nodes
        ]
        return make_dataframe(rows, [*names, "error", "relative_error"])


def _cause_of(node: Node, found: RootCause | None) -> RootCause:
    """Returns the root cause that a node is, with the lines of code if they were found."""
    return dataclasses.replace(
        found or RootCause(jax_module=node.path, torch_module=node.reference_path),
        error=node.worst.relative if node.worst is not None else 0.0,
        stage=node.stage,
        node=node,
    )


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


def _cause(values: Mapping[str, Any]) -> RootCause:
    lists = {name: tuple(values[name]) for name in ("jax_operators", "torch_operators")}
    return RootCause(**{**values, **lists, "error": float(values["error"])})


def _coverage(values: Mapping[str, Any] | None) -> Coverage | None:
    if values is None:
        return None
    made: dict[str, Any] = {
        name: None if value is None else tuple(value)
        for name, value in values.items()
        if name != "error"
    }
    return Coverage(**made, error=float(values["error"]))


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
