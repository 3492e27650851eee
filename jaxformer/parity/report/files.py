"""Reports as files, and what got worse from one report to the next."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from jaxformer.errors import CheckpointError
from jaxformer.parity.report.model import VERDICTS, Difference, Node, Report
from jaxformer.parity.report.tree import number, one_line, place, scientific
from jaxformer.storage.durable_files import atomic_write_bytes
from jaxformer.storage.local_files import LocalFile
from jaxformer.storage.strict_json import parse_json

# No report comes near it: a node has about 3 kB.
MAX_BYTES = 256 << 20


def save_json(report: Report, path: str | Path) -> None:
    """Writes a report as JSON; the file has its name only once all of it is on the disk.

    Attention maps are left out: they are many times all else, and the page draws them.

    Raises:
        ResourceError: the folder is missing, or the disk is full or may not be written.
    """
    nodes = tuple(dataclasses.replace(node, maps=None) for node in report.nodes)
    write_text(path, dataclasses.replace(report, nodes=nodes).to_json() + "\n")


def load_report(path: str | Path) -> Report:
    """Reads what ``save_json`` wrote.

    Raises:
        CheckpointError: there is no such file, or it is no report or not a complete one.
        UnsafeFileError: it names a key twice, or holds more entries than any report.
        ResourceError: it may not be read.
    """
    file = LocalFile(path)
    if file.size > MAX_BYTES:
        raise CheckpointError(
            f"{path} has {file.size / 2**20:.0f} MiB, more than any parity report; check the path"
        )
    values = parse_json(file.bytes(0, file.size), str(path))
    try:
        return Report.from_dict(values)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: {error}; write it again with jaxformer verify --json"
        ) from None


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file atomically and reads it back.

    Raises:
        ResourceError: it cannot be written, or reads back as something else.
    """
    atomic_write_bytes(path, text.encode("utf-8", "backslashreplace"))


def compare_reports(report: Report, before: Report) -> list[str]:
    """What got worse, a line each; empty where nothing did.

    A node got worse if its verdict did; if one of its float64 errors, relative to scale, is over
    twice what it was, and more than allowed; or if one of its rounding ratios (ours over theirs, in
    the dtype under test) is over twice what it was, ours is the less accurate side, and no bug
    comes in. Nodes that
    are new or missing are told too, as are settings that differ now and did not, and a run that
    parts where it did not, or earlier.

    Args:
        report: of now.
        before: of the same comparison, earlier.
    """
    kinds = [(one.mode, one.dtype) for one in (report, before)]
    if kinds[0] != kinds[1]:
        now, then = (f"{mode} in {dtype}" for mode, dtype in kinds)
        return [f"the reports do not compare the same: {now}, before {then}"]
    nodes = {node.path: node for node in report.nodes}
    old = {node.path: node for node in before.nodes}
    worse = [
        f"{place(node)}: missing, it was {node.verdict}"
        for path, node in old.items()
        if path not in nodes
    ]
    for path, node in nodes.items():
        if path not in old:
            worse.append(f"{place(node)}: new, {node.verdict}")
        else:
            worse += [f"{place(node)}: {reason}" for reason in _reasons(node, old[path])]
    known = {(s.name, s.candidate, s.reference) for s in before.settings}
    for s in report.settings:
        if (s.name, s.candidate, s.reference) not in known:
            worse.append(
                f"setting {s.name} differs: ours {s.candidate}, theirs {s.reference}; {s.effect}"
            )
    first_divergence = report.first_divergence
    if first_divergence is not None and (
        before.first_divergence is None or first_divergence.number < before.first_divergence.number
    ):
        then = (
            "never" if before.first_divergence is None else f"at {before.first_divergence.number}"
        )
        worse.append(
            f"the two part at {first_divergence.number}, before {then}: ours "
            f"{number(first_divergence.candidate)}, "
            f"theirs {number(first_divergence.reference)}"
        )
    return worse


def _reasons(node: Node, before: Node) -> Iterator[str]:
    """Why a node is worse than it was."""
    if VERDICTS.index(node.verdict) > VERDICTS.index(before.verdict):
        message = f": {one_line(node.message)}" if node.message else ""
        yield f"{node.verdict}, it was {before.verdict}{message}"
    old = before.differences
    for name, now in node.differences.items():
        then = old.get(name)
        if then is None:
            if now.is_bug:
                yield f"{name}: off by {scientific(now.relative)} of scale, new"
            continue
        # Nothing is worse than NaN.
        if now.is_bug and not now.relative <= 2 * then.relative and not math.isnan(then.error):
            yield (
                f"{name}: off by {scientific(now.relative)} of scale, "
                f"it was {scientific(then.relative)}"
            )
        yield from _rounding_reason(name, now, then)
    whole, whole_then = node.in_context, before.in_context
    # An error that float32 would show came in with a bug: the fault of another node.
    if whole and whole_then and whole.relative <= (whole.reference_rounding or 0):
        yield from _rounding_reason("in the whole model", whole, whole_then)


def _rounding_reason(name: str, now: Difference, then: Difference) -> Iterator[str]:
    """Whether its rounding error grew against theirs."""
    ratio, ratio_then = _ratio(now), _ratio(then)
    if ratio is not None and ratio_then is not None and ratio > max(2 * ratio_then, 1):
        yield f"{name}: its rounding error is {ratio:.2g} times theirs, it was {ratio_then:.2g}"


def _ratio(difference: Difference) -> float | None:
    """Our rounding error over theirs; None where it was not measured."""
    candidate, reference = difference.candidate_rounding, difference.reference_rounding
    if candidate is None or reference is None:
        return None
    if candidate == reference:
        return 1.0
    return candidate / reference if reference else float("inf")
