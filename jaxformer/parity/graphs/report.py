"""What a comparison of two tapes found: plain data, and its text."""

import dataclasses
from typing import Any, Literal

from jaxformer.parity.graphs.page import page
from jaxformer.parity.graphs.recording.tape import shorten
from jaxformer.parity.report.tables import make_dataframe

Verdict = Literal["exact", "rounding", "bug", "incomplete"]
# Root causes that are listed in full in the text.
MOST_LISTED = 8


@dataclasses.dataclass(frozen=True)
class RootCause:
    """One segment of the candidate that computes something else than the reference.

    Attributes:
        jax_source: "path:line" of the candidate's code; "" where it is not known.
        torch_source: "path:line" of the reference's code.
        diagnosis: what would make it right; "" if nothing that was tried does.
        error: the largest difference, as a share of the largest number of the right result.
        jax_operators: names of the primitives of the segment, in order.
        torch_operators: names of the ATen operators.
        jax_module: name of the candidate's module; "" where the framework gives none.
        torch_module: path of the reference's module.
        places: how many times the same line is wrong in the same way, as in each layer.
        effect: how far it moves the results if all else is right, of their scale; None where that
            is not known.
        is_backward: whether the gradient is wrong where the result is right.
        jax_after: "path:line" of the code that made what the candidate's line reads. A step that is
            missing has no line: it belongs between the two.
    """

    jax_source: str
    torch_source: str
    diagnosis: str
    error: float
    jax_operators: tuple[str, ...] = ()
    torch_operators: tuple[str, ...] = ()
    jax_module: str = ""
    torch_module: str = ""
    places: int = 1
    effect: float | None = None
    is_backward: bool = False
    jax_after: str = ""


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much was compared.

    Attributes:
        modules: modules of the reference whose output a value of the candidate equals or was put
            right to equal, and how many were called.
        operators: operators of the reference that read a parameter and were compared with one of
            the candidate that reads the same, and how many there are.
        parameters: parameters of the candidate found in the reference, and how many there are.
        values: floats of the candidate that equal a value of the reference, and how many there are.
        gradients: parameters and float inputs of the candidate whose gradient was compared, and how
            many there are; (0, 0) if there was no backward pass.
    """

    modules: tuple[int, int]
    operators: tuple[int, int]
    parameters: tuple[int, int]
    values: tuple[int, int]
    gradients: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True, repr=False)
class GraphReport:
    """What became of a comparison.

    Attributes:
        kind: what the candidate is.
        root_causes: the most severe first.
        weights: a sentence for each parameter of the candidate that is wrong.
        tables: a sentence for each constant that is only rounded to float32.
        incomplete: a sentence for each part that was not compared, and why.
        coverage: how much was compared.
        error: the largest difference of an equal value, as a share of its largest number.
        uncompared_modules: paths of modules of the reference without a counterpart.
        remarks: what a reader should know of how the results were compared.
    """

    kind: str
    root_causes: tuple[RootCause, ...]
    weights: tuple[str, ...]
    tables: tuple[str, ...]
    incomplete: tuple[str, ...]
    coverage: Coverage
    error: float
    uncompared_modules: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Whether there is a bug, or something was not compared, or all is equal."""
        if self.root_causes or self.weights:
            return "bug"
        if self.incomplete:
            return "incomplete"
        return "rounding" if self.error or self.tables else "exact"

    def __repr__(self) -> str:
        return f"<GraphReport of {self.kind}: {self.headline}>"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        """Returns the report as a page, for a notebook."""
        return page(self)

    def to_dataframe(self) -> Any:
        """Returns the root causes as a table of pandas, one row each.

        Raises:
            UsageError: pandas is not installed.
        """
        names = [field.name for field in dataclasses.fields(RootCause)]
        rows = [[getattr(cause, name) for name in names] for cause in self.root_causes]
        return make_dataframe(rows, names)

    def _lines(self) -> list[str]:
        c = self.coverage
        lines = [
            f"{self.kind} against PyTorch: {self.headline}",
            f"compared: {c.modules[0]} of {c.modules[1]} modules, {c.operators[0]} of "
            f"{c.operators[1]} operators with parameters, {c.parameters[0]} of {c.parameters[1]} "
            f"parameters, {c.gradients[0]} of {c.gradients[1]} gradients; {c.values[0]} of "
            f"{c.values[1]} values of the candidate are equal to one of the reference",
        ]
        for number, cause in enumerate(self.root_causes[:MOST_LISTED], 1):
            lines += ["", *_describe(number, cause)]
        if len(self.root_causes) > MOST_LISTED:
            lines += ["", f"and {len(self.root_causes) - MOST_LISTED} smaller ones"]
        for title, sentences in (
            ("wrong parameters", self.weights),
            ("constants in float32 (no bug)", self.tables),
            ("not compared", self.incomplete),
            ("remarks", self.remarks),
        ):
            if sentences:
                lines += ["", f"{title}:", *(f"  {text}" for text in sentences[:MOST_LISTED])]
                if len(sentences) > MOST_LISTED:
                    lines.append(f"  and {len(sentences) - MOST_LISTED} more")
        return lines

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        bugs = len(self.root_causes) + len(self.weights)
        if self.verdict == "bug":
            return "1 bug" if bugs == 1 else f"{bugs} bugs"
        if self.verdict == "incomplete":
            return "incomplete: no bug was found in what was compared"
        return f"equal ({self.verdict}), at most {self.error:.1e} of scale apart"


def _describe(number: int, cause: RootCause) -> list[str]:
    module = f" in {cause.torch_module}" if cause.torch_module else ""
    text = f"{number}. {cause.diagnosis or 'the two segments differ'}{module}"
    if cause.places > 1:
        text += f" and {cause.places - 1} more {'place' if cause.places == 2 else 'places'}"
    backward = ", in the backward pass alone" if cause.is_backward else ""
    effect = "" if cause.effect is None else f"; it moves the results by {cause.effect:.1e}"
    lines = [text, f"   off by {cause.error:.1e} of scale{effect}{backward}"]
    for side, source, operators in (
        ("candidate", cause.jax_source, cause.jax_operators),
        ("reference", cause.torch_source, cause.torch_operators),
    ):
        shown = " → ".join(operators[-6:])
        lines.append(f"   {side}  {shorten(source) or 'source unknown'}  {shown}")
        if side == "candidate" and cause.jax_after not in ("", source):
            lines.append(f"   reads what {shorten(cause.jax_after)} makes")
    return lines
