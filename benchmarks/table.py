"""Writes the results of benchmarks/results into the documents that show them.

    python benchmarks/table.py            writes all of them
    python benchmarks/table.py --check    fails where a figure there is not that of a result

What lies between ``<!-- speed: NAME -->`` and ``<!-- end of NAME -->`` is written here.
"""

import argparse
import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import measure
import sides

RESULTS = Path(__file__).parent / "results"
DOCS = measure.ROOT / "docs"
# The results, as pages link to them.
FOLDER = "../../benchmarks/results"
TARGETS = (
    DOCS / "explanation" / "speed.md",
    DOCS / "explanation" / "scale.md",
    DOCS / "explanation" / "growth.md",
    DOCS / "guides" / "accelerators.md",
    DOCS / "guides" / "data.md",
    DOCS / "guides" / "writing.md",
    DOCS / "tutorials" / "port.md",
)
BENCHMARKS = (
    "training_step", "evaluation", "generation", "start_up", "time_to_loss", "porting",
    "checkpointing", "scale", "tokenizing", "token_folders", "loading", "peers",
    "families", "growth", "narrow_weights", "many_requests", "drafts", "choosing",
    "accelerator_checks", "jax_versions", "products",
)  # fmt: skip
Result = dict[str, Any]


def load() -> list[Result]:
    """Returns every result with its ``file``, in the order of the names."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("benchmark") in BENCHMARKS:
            found.append({**result, "file": path.name})
    return found


def describe(result: Result) -> str:
    """Returns a result as Markdown: how it was measured, and the table that its script prints."""
    machine, versions = result["machine"], result["versions"]
    named = ("python", "jax", "flax", "torch", "transformers")
    lines = [
        f"#### {result['file'].removesuffix('.json')}",
        "",
        f"`{result['command']}`",
        "",
        f"[{result['file']}]({FOLDER}/{result['file']}), {result['date'][:10]}: "
        + ", ".join(machine["gpu"] or [processor(machine)])
        + f"; {', '.join(f'{n} {versions[n]}' for n in named if n in versions)}"
        + f"; load average before and after: {_load(machine)}.",
        *_notes(result),
        "",
        *_picture(result),
        *_table(importlib.import_module(result["benchmark"]).COLUMNS, result["results"]),
    ]
    return "\n".join(lines)


def _picture(result: Result) -> list[str]:
    """Returns lines with the picture of a result; docs/draw_results.py draws those of growth."""
    if result["benchmark"] != "growth":
        return []
    name = result["file"].replace(".json", ".svg")
    return [f"![Time, compiling and memory along each axis](../images/{name})", ""]


def _load(machine: Mapping[str, Any]) -> str:
    loads = (machine[f"load_average_at_{when}"] for when in ("start", "end"))
    return " and ".join("unknown" if load is None else str(load) for load in loads)


def _notes(result: Result) -> list[str]:
    """Returns lines with the limits of the machine, and with what failed."""
    lines = []
    if "limits" in result:
        limits = result["limits"]
        peaks = (f"{dtype} {m['flops'] / 1e9:,.0f}" for dtype, m in limits["matmul"].items())
        lines.append(
            f"Measured at most: matrix products at {', '.join(peaks)} GFLOP/s, reading at "
            f"{limits['memory']['read'] / 1e9:.0f} GB/s."
        )
    if "read_from" in result:
        lines.append(f"Read from {result['read_from']}.")
    if "batch_size" in result:
        lines.append(f"A batch is {result['batch_size']} windows.")
    if "steps_per_turn" in result:
        untimed = result.get("untimed_steps_per_turn", 0)
        lines.append(f"Steps in a turn: {result['steps_per_turn']}, after {untimed} not timed.")
    if "dropout" in result:
        lines.append(f"Dropout: {result['dropout']:g}, on all sides.")
    if result.get("kills"):
        same = "the same as" if result["kills"]["identical"] else "other than"
        lines.append(
            f"Killed {result['kills']['kills']} times at random and started again, its files "
            f"are {same} those of a run uncut."
        )
    if "tokens" in result and "memory" in result:
        lines.append(
            f"The folder has {result['tokens']:,} tokens. Reading them from the disk added "
            f"{result['memory']['added'] / 2**20:.0f} MiB to the memory of the process."
        )
    for side, things in result.get("cannot", {}).items():
        lines += [f"{side}, {what}: {why}." for what, why in things.items()]
    lines += [f"{side} failed: {error}." for side, error in result.get("failed", {}).items()]
    return lines


def _table(
    columns: Mapping[str, Callable[[Mapping[str, Any]], str]], rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    head = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return head + [f"| {' | '.join(show(row) for show in columns.values())} |" for row in rows]


def of_benchmark(name: str, results: Sequence[Result]) -> str:
    """Returns the section of one benchmark."""
    found = [describe(result) for result in results if result["benchmark"] == name]
    return "\n\n".join(found) or "Not measured yet."


def summary(results: Sequence[Result]) -> str:
    """Returns the table that sums up: jaxformer and the fastest other side, a column a machine."""
    machines: list[str] = []
    lines: dict[str, dict[str, str]] = {}
    for result in results:
        for what, rows, value, show in _comparisons(result):
            jaxformer, *others = sorted(rows, key=lambda row: row["side"] not in JAXFORMER_SIDES)
            if not others:
                continue
            best = min(others, key=value)
            gpu = result["machine"]["gpu"]
            machine = gpu[0].partition(",")[0] if gpu else processor(result["machine"])
            if machine not in machines:
                machines.append(machine)
            lines.setdefault(what, {})[machine] = (
                f"[**{value(best) / value(jaxformer):.2f}**]({FOLDER}/{result['file']}): "
                f"{show(jaxformer)} against {show(best)} ({best['side']})"
            )
    head = [f"| | {' | '.join(machines)} |", "|---" * (len(machines) + 1) + "|"]
    body = [
        f"| {what} | {' | '.join(cells.get(machine, '') for machine in machines)} |"
        for what, cells in lines.items()
    ]
    return "\n".join(head + body) if body else "Not measured yet."


def processor(machine: Mapping[str, Any]) -> str:
    """Returns the name of a processor, what of it was used, and how many cores there were."""
    # Older results do not say which instructions there were.
    instructions = machine.get("vector_instructions")
    name = f"{machine['cpu']} with {instructions}" if instructions else machine["cpu"]
    if machine.get("all_of_mkl"):
        name += " and all of MKL"
    if machine.get("only_avx2"):
        name += ", used as AVX2"
    return f"{name}, {machine['cores']} cores"


JAXFORMER_SIDES = ("jaxformer", "train.py")


def differences(result: Result) -> str:
    """Returns in what a result's settings differ from those of most: `` without dropout``."""
    settings, text = result["settings"], ""
    if settings.get("dtype") == "bfloat16":
        text += " in bfloat16"
    if settings.get("no_dropout"):
        text += " without dropout"
    if settings.get("no_attention_dropout"):
        text += " without dropout on attention"
    usual = (None, sides.CPU_BATCHES.get(settings.get("preset")))
    if settings.get("batch_size") not in usual and not result["machine"]["gpu"]:
        text += f", batches of {settings['batch_size']}"
    return text


def _comparisons(result: Result) -> list[tuple[str, list[Any], Any, Any]]:
    """Returns what the summary compares of a result: text, rows, value and format of a row."""
    rows, preset = result["results"], result["settings"].get("preset")
    dtype = result["settings"].get("dtype")
    model = f"`{preset}`{differences(result)}"

    def median(field: str, row: Any) -> float:
        seconds: float = row[field]["median"]
        return seconds

    if result["benchmark"] in ("training_step", "evaluation"):
        step = result["benchmark"] == "training_step"
        value = functools.partial(median, "seconds_per_step" if step else "seconds")
        what = f"{'training step' if step else 'evaluation'} of {model}, tokens/s"
        return [(what, rows, value, lambda row: f"{row['tokens_per_second']:,.0f}")]
    if result["benchmark"] == "generation":
        size = "{layers} layers, {width} wide".format(**result["settings"])
        size += f" in {dtype}" if dtype == "bfloat16" else ""
        return [
            (
                f"writing {batch} text{'s' if batch > 1 else ''} at once, {size}, tokens/s",
                [row for row in rows if row["batch"] == batch],
                functools.partial(median, "seconds"),
                lambda row: f"{row['tokens_per_second']:,.0f}",
            )
            for batch in sorted({row["batch"] for row in rows})
        ]
    if result["benchmark"] == "start_up":
        return [
            (
                f"from the command to the first step of {model}, {cache} cache",
                [row for row in rows if row["cache"] in (cache, "none")],
                functools.partial(median, "seconds"),
                lambda row: f"{row['seconds']['median']:.1f} s",
            )
            for cache in ("cold", "warm")
        ]
    if result["benchmark"] == "time_to_loss":
        there = [row for row in rows if row["arrived"]]
        if len(there) > 1 and any(row["side"] in JAXFORMER_SIDES for row in there):
            return [
                (
                    f"training {model} to a validation loss of {result['target']}",
                    there,
                    lambda row: row["seconds"],
                    lambda row: f"{row['seconds']:.1f} s",
                )
            ]
    return []


def scale_sentence(results: Sequence[Result]) -> str:
    """Returns the text on how far the model of docs/explanation/scale.md is from the compiler."""
    scale = importlib.import_module("scale")
    rows = [row for r in results if r["benchmark"] == "scale" for row in r["results"]]
    compiled = [row for row in rows if "compiled" in row]
    if not compiled:
        return "No row was compiled yet."
    sentences = []
    for kind, bound in scale.LARGEST_DEVIATION.items():
        found = [
            (scale.deviation(row), f"{row['preset']} on {row['topology']}")
            for row in compiled
            if scale.kind_of(row) == kind
        ]
        if found:
            deviation, worst = max(found, key=lambda pair: abs(pair[0]))
            sentences.append(
                f"Rows compiled for {kind}s: {len(found)}. The model's memory is farthest off for "
                f"{worst}: {100 * deviation:+.0f} %. `tests/planning/test_scale.py` holds every "
                f"one to {100 * bound:.0f} %."
            )
    return "\n".join(sentences)


def porting_sentence(results: Sequence[Result]) -> str:
    """Returns the text on the speed of porting, from the newest result."""
    found = [result for result in results if result["benchmark"] == "porting"]
    if not found:
        return "How fast porting is was not measured yet."
    result = max(found, key=lambda r: r["date"])
    rows = {row["side"]: row for row in result["results"]}
    file, folder, disk = (
        next(rows[side] for side in rows if side.startswith(name))
        for name in ("port to safetensors", "port to a run folder", "disk")
    )
    size, memory = result["checkpoint_bytes"], "peak_bytes_beyond_imports"

    def seconds(row: Mapping[str, Any]) -> tuple[str, str]:
        return f"{row['seconds']['min']:.1f} s", f"{row['seconds']['median']:.1f} s"

    best, middle = seconds(file)
    disk_best, disk_middle = seconds(disk)
    return (
        f"A checkpoint of GPT-2 small's size (124 M float32 numbers, {size / 1e6:.0f} MB) goes "
        f"from a Hugging Face folder to torch_ref's names in {best} at best and {middle} in the "
        f"median, where the disk alone takes {disk_best} and {disk_middle}, and needs "
        f"{file[memory] / 1e6:.0f} MB of memory beyond JAX's own "
        f"([result]({FOLDER}/{result['file']})); a run's folder, which is held as a "
        f"whole, needs {folder[memory] / 1e9:.1f} GB."
    )


def render(text: str, results: Sequence[Result]) -> str:
    """Returns the text of a document with its blocks replaced.

    Raises:
        SystemExit: a block is not closed, or has a name that is not known.
    """
    blocks: dict[str, Callable[[Sequence[Result]], str]] = {
        **{name: functools.partial(of_benchmark, name) for name in BENCHMARKS},
        "summary": summary,
        "porting summary": porting_sentence,
        "scale deviation": scale_sentence,
    }

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in blocks:
            sys.exit(f"there is no block {name!r}: choose among {', '.join(blocks)}")
        return f"<!-- speed: {name} -->\n{blocks[name](results)}\n<!-- end of {name} -->"

    pattern = r"<!-- speed: ([^>]*?) -->\n.*?<!-- end of \1 -->"
    opened = text.count("<!-- speed: ")
    written, count = re.subn(pattern, block, text, flags=re.DOTALL)
    if count != opened:
        sys.exit(f"{opened - count} of {opened} blocks are not closed")
    return written


def main() -> int:
    """Writes the documents, or checks them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    results = load()
    stale = []
    for path in TARGETS:
        text = path.read_text(encoding="utf-8")
        written = render(text, results)
        if arguments.check and written != text:
            stale.append(path.name)
        elif not arguments.check:
            path.write_text(written, encoding="utf-8")
    for name in stale:
        print(f"{name} does not say what benchmarks/results does", file=sys.stderr)
    if stale:
        print("write it anew with: python benchmarks/table.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
