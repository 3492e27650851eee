"""Which kernels some steps ran on the device, and for how long, as a table that is plain text.

On a CPU, where there are no kernels, the table is of what the framework's threads did.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from measure import on_gpu, rounded, wait_for_torch

MOST_ROWS = 60


class Event(NamedTuple):
    """One run of a kernel: its times in nanoseconds, and what the framework calls its work."""

    name: str
    start: float
    duration: float
    work: str = ""


Trace = Callable[[Callable[[], Any], Path], list[Event]]


def write(side: str, trace: Trace, call: Callable[[], Any], steps: int, folder: Path) -> None:
    """Traces a call, and writes ``kernels-SIDE.json`` and ``kernels-SIDE.txt`` into a folder.

    A trace that fails is a line on standard error: the times that were measured before stand.

    Args:
        side: its name.
        trace: ``trace_jax`` or ``trace_torch``.
        call: what to trace; it is called once before, untraced.
        steps: how many it makes.
        folder: where the files and JAX's own trace go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = "kernels-" + "-".join(side.replace(",", "").split())
    call()
    try:
        table = summarize(trace(call, folder / stem), steps)
    except Exception as error:
        print(f"no profile of {side}: {error or type(error).__name__}", file=sys.stderr)
        return
    (folder / f"{stem}.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    head = {name: value for name, value in table.items() if name != "kernels"}
    lines = [", ".join(f"{name} {value}" for name, value in head.items())]
    lines += [
        f"{row['microseconds_per_step']:>12,.1f} {row['share']:>6.1%} {row['count_per_step']:>8.4g}"
        f"  {row['name'][:100]}  {row['work'][-120:]}".rstrip()
        for row in table["kernels"]
    ]
    (folder / f"{stem}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def summarize(events: Iterable[Event], steps: int) -> dict[str, Any]:
    """Sums events by name.

    Returns:
        ``steps``; in microseconds a step ``span``, from the first event's start to the last one's
        end, ``busy``, in which at least one ran, and ``sum``; ``names``, how many there are; and
        ``kernels``, the 60 that took longest, with the share of the sum.
    """
    ordered = sorted(events, key=lambda event: event.start)
    if not ordered:
        raise ValueError("the trace holds no kernels")
    scale = 1e-3 / steps
    busy, reached = 0.0, ordered[0].start
    found: dict[str, dict[str, Any]] = {}
    for name, start, duration, work in ordered:
        busy += max(0.0, start + duration - max(start, reached))
        reached = max(reached, start + duration)
        row = found.setdefault(name, {"name": name, "work": work, "sum": 0.0, "count": 0})
        row["sum"] += duration
        row["count"] += 1
    total = sum(row["sum"] for row in found.values())
    longest = sorted(found.values(), key=lambda row: -row["sum"])[:MOST_ROWS]
    return {
        "steps": steps,
        "span": rounded((reached - ordered[0].start) * scale),
        "busy": rounded(busy * scale),
        "sum": rounded(total * scale),
        "names": len(found),
        "kernels": [
            {
                "name": row["name"],
                "microseconds_per_step": rounded(row["sum"] * scale),
                "count_per_step": rounded(row["count"] / steps),
                "share": rounded(row["sum"] / total) if total else 0.0,
                "work": row["work"],
            }
            for row in longest
        ],
    }


def trace_jax(call: Callable[[], Any], folder: Path) -> list[Event]:
    """Returns what a call runs on JAX's device, of the trace that ``jax.profiler`` writes."""
    import jax

    options = jax.profiler.ProfileOptions()
    # Python's calls are not wanted, and slow the host down.
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        call()
    path = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    return read_jax(path)


def read_jax(path: Path) -> list[Event]:
    """Returns the kernels in an ``xplane.pb``, or without a GPU what XLA's threads computed.

    Raises:
        ValueError: there are none; the message says what there is.
    """
    import jax

    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU:")]
    found = []
    for plane in gpus or planes:
        for line in plane.lines:
            # Other lines of a GPU's plane sum up what its streams ran.
            if gpus and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                if event.duration_ns and (gpus or "hlo_op" in stats):
                    work = stats.get("name") or stats.get("tf_op") or stats.get("hlo_op") or ""
                    found.append(Event(event.name, event.start_ns, event.duration_ns, str(work)))
    if not found:
        lines = {plane.name: [line.name for line in plane.lines] for plane in planes}
        raise ValueError(f"the trace holds no kernels: {lines}")
    return found


def trace_torch(call: Callable[[], Any], folder: Path) -> list[Event]:
    """Returns the kernels that a call runs, by ``torch.profiler``; on a CPU the operators."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    del folder  # Only JAX's profiler hands its trace over in a file.
    device = "CUDA" if on_gpu() else "CPU"
    with profile(activities=[getattr(ProfilerActivity, device)]) as traced:
        call()
        wait_for_torch()
    wanted = getattr(torch.autograd.DeviceType, device)
    return [
        Event(
            event.name,
            1e3 * event.time_range.start,
            1e3 * (event.time_range.elapsed_us() if on_gpu() else event.self_cpu_time_total),
        )
        for event in traced.events() or []
        if event.device_type == wanted and not event.is_user_annotation
    ]
