"""Plans the training of llama-style models at 1B, 7B and 70B with ``jaxformer plan``.

    uv run --group test --extra tpu python benchmarks/scale.py --out benchmarks/results/scale.json

The steps are compiled ahead of time, which takes up to minutes for each and needs neither TPU nor
GPU. Each row also has the model's estimate, or only that where nothing was compiled. GPUs need
``--extra cuda`` in place of ``tpu``, and ``--only H100:8 H100:64``. Nothing is measured: step times
are rooflines. Rows that ``--out`` has already are kept; ``--again`` makes all of them again,
``--model-only`` those of the model, and ``--only NAME`` takes the rows whose preset or topology has
that name.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import measure

GIB = 2**30
DAY = 86400
# Of the model's memory from the compiler's, of all compiled rows. Where XLA lays out arrays for a
# GPU, small ones lie in gaps of large ones.
LARGEST_DEVIATION = {"TPU": 0.1, "GPU": 0.2}
# What the model says in both.
COUNTED = ("gradients", "activations")
COMMON = "--strategy mesh --dtype bfloat16 --remat full --scan-layers"
# Preset, topology, mesh and batch, and whether it is compiled.
ROWS = [
    ("llama-1b", "v5e:4x4", "--fsdp 16 --batch-size 64", True),
    ("llama-1b", "v5p:2x2x1", "--fsdp 4 --batch-size 64", False),
    ("llama-1b", "v6e:2x4", "--fsdp 8 --batch-size 64", True),
    ("llama-1b", "H100:8", "--fsdp 8 --batch-size 128", True),
    ("llama-7b", "v5e:8x8", "--fsdp 64 --batch-size 64", True),
    ("llama-7b", "v5p:2x2x4", "--fsdp 16 --batch-size 64", True),
    ("llama-7b", "v6e:4x8", "--fsdp 32 --batch-size 64", True),
    ("llama-7b", "H100:8", "--fsdp 8 --batch-size 16", True),
    ("llama-7b", "H100:64", "--fsdp 64 --batch-size 128", True),
    ("llama-70b", "v5e:16x16", "--fsdp 256 --batch-size 256", True),
    ("llama-70b", "v5e:16x16", "--fsdp 128 --tensor 2 --batch-size 128", True),
    ("llama-70b", "v5p:4x4x8", "--fsdp 128 --batch-size 128", True),
    ("llama-70b", "v5p:8x8x16", "--fsdp 1024 --batch-size 1024", False),
    ("llama-70b", "v6e:16x16", "--fsdp 256 --batch-size 256", True),
    ("llama-70b", "H100:64", "--fsdp 64 --batch-size 64", True),
    ("llama-70b", "H100:512", "--fsdp 512 --batch-size 512", False),
]


def main() -> None:
    """Plans every row."""
    parser = measure.parser(__doc__, turns=1)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--model-only", action="store_true")
    arguments = parser.parse_args()
    known = {}
    if arguments.out is not None and arguments.out.exists() and not arguments.again:
        earlier = json.loads(arguments.out.read_text(encoding="utf-8"))["results"]
        known = {row["command"]: row for row in earlier}
    commands = [f"--preset {p} --topology {t} {COMMON} {flags}" for p, t, flags, _ in ROWS]
    rows = [
        known.get(c, {"preset": r[0], "topology": r[1]})
        for r, c in zip(ROWS, commands, strict=True)
    ]
    try:
        for row, command, (*names, _, compiles) in zip(rows, commands, ROWS, strict=True):
            if arguments.only and not set(names) & set(arguments.only):
                continue
            if "model" not in row or arguments.model_only:
                row |= {"command": command, "model": reckon(command)}
                if "compiled" in row:
                    row["compiled"] |= {name: row["model"][name] for name in COUNTED}
            if compiles and "compiled" not in row and not arguments.model_only:
                row["compiled"] = plan(command)
    finally:
        # A compilation that fails or takes too long costs only its own row.
        measure.write("scale", arguments, [row for row in rows if "model" in row], COLUMNS)


def options_of(flags: str) -> Any:
    """Returns the ``PlanOptions`` that ``jaxformer plan`` makes of these flags."""
    import tyro

    from jaxformer.cli.plan import PlanOptions
    from jaxformer.training.presets import PRESETS

    arguments = flags.split()
    preset = PRESETS[arguments[arguments.index("--preset") + 1]]()
    return tyro.cli(PlanOptions, args=arguments, default=PlanOptions(config=preset))


def reckon(flags: str) -> dict[str, Any]:
    """Returns the result of ``jaxformer plan --model-only``."""
    from jaxformer.planning.plan import find_plan

    options = options_of(flags)
    needs = find_plan(
        options.config, topology=options.topology, model_only=True, download=options.download
    ).to_dict()
    del needs["fits"]
    return needs


def plan(flags: str) -> dict[str, Any]:
    """Returns the result of ``jaxformer plan``, and the seconds that it took."""
    print(f"jaxformer plan {flags}", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "jaxformer", "plan", "--json", *flags.split()],
        cwd=measure.ROOT,
        env={**os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    needs: dict[str, Any] = json.loads(done.stdout)
    del needs["fits"]
    return {**needs, "seconds_to_plan": round(time.perf_counter() - begin, 1)}


def deviation(row: Mapping[str, Any]) -> float:
    """Returns how far the model's memory of a device is from the compiler's, as a share."""
    total: float = row["model"]["total"] / row["compiled"]["total"] - 1
    return total


def kind_of(row: Mapping[str, Any]) -> str:
    """Returns the kind of a row's devices, a key of ``LARGEST_DEVIATION``."""
    return "GPU" if row["topology"].startswith("H100") else "TPU"


def best(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the compiled plan of a row, or else the model's."""
    needs: Mapping[str, Any] = row.get("compiled") or row["model"]
    return needs


def _memory(row: Mapping[str, Any]) -> str:
    needs = best(row)
    verdict = "" if needs["total"] <= needs["capacity"] else " **does not fit**"
    return f"{needs['total'] / GIB:.1f} of {needs['capacity'] / GIB:.0f} GiB{verdict}"


def _mesh(row: Mapping[str, Any]) -> str:
    return " × ".join(f"{a} {n}" for a, n in best(row)["mesh"].items() if n > 1)


def _step(row: Mapping[str, Any]) -> str:
    roofline = best(row)["roofline"]
    return f"{roofline['seconds']:.2f} s, {roofline['bound']}"


COLUMNS = {
    "model": lambda row: row["preset"],
    "on": lambda row: row["topology"],
    "mesh": _mesh,
    "source": lambda row: "compiled" if "compiled" in row else "model",
    "memory of a device": _memory,
    "by the model": lambda row: f"{row['model']['total'] / GIB:.1f} GiB",
    "tokens a step": lambda row: f"{best(row)['tokens_per_step'] / 1e3:,.0f} k",
    "step, no faster than": _step,
    "MFU, at most": lambda row: f"{100 * best(row)['roofline']['utilization']:.0f}%",
    "tokens a day, at most": lambda row: f"{best(row)['tokens_per_second'] * DAY / 1e9:.1f} G",
}


if __name__ == "__main__":
    measure.run(main)
