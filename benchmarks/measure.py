"""What every benchmark uses: facts of the machine, interleaved timing, and the result file.

A result is one JSON object: ``benchmark``, ``command``, ``date``, ``machine``, ``versions``,
``environment``, ``settings``, ``limits`` (where measured) and ``results``, a list of rows. Times
are in seconds, memory in bytes, work in FLOP: a row's ``seconds`` is what ``spread`` returns.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import stand_ins

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers", "triton")
VARIABLES = ("GLIBC_TUNABLES", "XLA_FLAGS", "OMP_NUM_THREADS", "TORCH_LOGS", "CUDA_VISIBLE_DEVICES")
FIELDS = ("benchmark", "command", "date", "machine", "versions", "environment", "settings")
LOAD_AVERAGE_AT_START = round(os.getloadavg()[0], 2)

# The scripts run without an installation.
sys.path.insert(1, str(ROOT))
# Both frameworks share one GPU in one process. JAX reads this when it is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def parser(doc: str | None, *, turns: int) -> argparse.ArgumentParser:
    """Returns a command line with the options of every benchmark.

    Where another processor is to be stood in for, the program begins anew here.
    """
    stand_ins.reexec_if_asked()
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--turns", type=_positive, default=turns, help="default %(default)s")
    made.add_argument("--out", type=Path, help="file for the JSON result; default standard output")
    stand_ins.add_arguments(made)
    return made


def run(main: Callable[[], None]) -> None:
    """Runs a script as jaxformer's command runs: an error is one line and an exit code.

    All sides run in the same process, and so with the same memory pages.

    Raises:
        SystemExit: jaxformer raised one of its errors.
    """
    from jaxformer.errors import JaxformerError
    from jaxformer.hardware.huge_pages import reexec_with_huge_pages

    reexec_with_huge_pages()

    try:
        main()
    except JaxformerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def facts() -> dict[str, Any]:
    """Returns machine, versions, environment, command and date of this run, without JAX."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
    return {
        "command": shlex.join(["python", str(shown), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": processor(),
            "vector_instructions": vector_instructions(),
            "all_of_mkl": stand_ins.uses_all_of_mkl(),
            "only_avx2": stand_ins.uses_only_avx2(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(memory / 2**30, 1),
            "gpu": _gpus(),
            "load_average_at_start": LOAD_AVERAGE_AT_START,
            "load_average_at_end": round(os.getloadavg()[0], 2),
        },
        "versions": versions,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in VARIABLES or name.startswith(("JAX_", "XLA_PYTHON_", "PYTORCH_", "KMP_"))
        },
    }  # fmt: skip


def interleave(
    sides: Mapping[str, Callable[[], Any]],
    turns: int,
    *,
    warm_up: int = 1,
    before: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Calls every side in turn, and returns its times.

    Each callable returns when its work is done. The order shifts by one from turn to turn, so that
    no side always follows the same other; a slow moment of the machine falls on all of them.

    Args:
        sides: what to time, by name.
        turns: how many timed calls of each.
        warm_up: calls of each before them, of which the first is reported: it compiles.
        before: what a side does, by name, right before each timed call and untimed: it fetches the
            memory that the machine took back while the others had their turns.

    Returns:
        For each name ``first_call`` (seconds) and ``seconds``, as ``spread`` returns it.
    """
    first = {}
    for name, call in sides.items():
        first[name] = seconds_of(call)
        for _ in range(warm_up - 1):
            call()
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            if before and name in before:
                before[name]()
            times[name].append(seconds_of(sides[name]))
    return {
        name: {"first_call": rounded(first[name]), "seconds": spread(times[name])} for name in names
    }


def seconds_of(call: Callable[[], Any]) -> float:
    """Returns the wall time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def processor_seconds() -> float:
    """Returns the time that all threads of this process have used so far, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns ``median``, ``min``, ``max``, the quartiles ``q1`` and ``q3``, and ``count``."""
    q1, median, q3 = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [values[0]] * 3
    )
    figures = {"median": median, "min": min(values), "max": max(values), "q1": q1, "q3": q3}
    return {**{name: rounded(value) for name, value in figures.items()}, "count": len(values)}


def scaled(times: Mapping[str, float], factor: float) -> dict[str, float]:
    """Returns a spread with its times multiplied, as from a turn of many steps to one."""
    return {
        name: value if name == "count" else rounded(value * factor) for name, value in times.items()
    }


def rounded(value: float) -> float:
    """Rounds to five significant digits: more would be noise."""
    return float(f"{value:.5g}")


def on_gpu() -> bool:
    """Returns whether JAX runs on a GPU."""
    import jax

    return jax.default_backend() == "gpu"


def torch_device() -> Any:
    """Returns the device that torch is to use, the kind that JAX uses, and pins its threads.

    On a GPU float32 products take TensorFloat-32, as JAX's do by default.

    Raises:
        SystemExit: JAX has an accelerator that this torch has not.
    """
    import jax
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if jax.default_backend() == "cpu":
        return torch.device("cpu")
    if not on_gpu() or not torch.cuda.is_available():
        sys.exit(f"JAX runs on {jax.devices()[0].device_kind}, which torch does not see here")
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda")


def wait_for_torch() -> None:
    """Returns when torch's queued work is done."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_memory() -> dict[str, int]:
    """Returns ``process``, the most resident memory so far, and on a GPU ``device``.

    In bytes. The device's figure of the framework that was not used is 0, so each side needs a
    process of its own.
    """
    # In kilobytes on Linux. A child starts with its parent's: the status file has its own.
    found = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        found["process"] = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM:"))
    if "jax" in sys.modules and on_gpu():
        import jax

        found["device"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_initialized():
            found["device"] = max(found.get("device", 0), torch.cuda.max_memory_allocated())
    return found


def device_peak(call: Callable[[], Any], framework: str) -> int | None:
    """Calls, and returns the most memory that a framework has had on the GPU meanwhile, in bytes.

    JAX keeps one figure from its beginning on: it is of this call where it has risen by it.

    Args:
        call: what to do.
        framework: ``jax`` or ``torch``.

    Returns:
        The memory beyond what there was before; None without a GPU, and where it is not known.
    """
    if not on_gpu():
        call()
        return None
    if framework == "torch":
        import torch

        wait_for_torch()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        wait_for_torch()
        return torch.cuda.max_memory_allocated() - before
    import jax

    def read(field: str) -> int:
        return (jax.devices()[0].memory_stats() or {}).get(field, 0)

    used, peak = read("bytes_in_use"), read("peak_bytes_in_use")
    call()
    risen = read("peak_bytes_in_use")
    return risen - used if risen > peak else None


def python_path() -> str:
    """Returns where a process of a benchmark finds modules: the sources first."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def child(arguments: Sequence[str], **environment: str) -> dict[str, Any]:
    """Runs Python with these arguments, and returns the JSON of its last line of output.

    Raises:
        RuntimeError: it failed; the message ends with its last lines.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": python_path(), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.splitlines()[-5:]))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write(
    benchmark: str,
    arguments: argparse.Namespace,
    results: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Callable[[Mapping[str, Any]], str]],
    **more: Any,
) -> None:
    """Writes the result as JSON to ``--out`` or standard output, and a table to standard error.

    Args:
        benchmark: its name, that of the script.
        arguments: of the command line, which become ``settings``.
        results: the rows.
        columns: of the table: a heading, and how a row is shown under it.
        more: further fields, such as ``limits``.
    """
    from rich.console import Console
    from rich.table import Table

    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
    report = {"benchmark": benchmark, **facts(), "settings": settings, **more, "results": results}
    text = json.dumps(report, indent=1) + "\n"
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    table = Table(title=report["command"])
    for heading in columns:
        table.add_column(heading, justify="left" if heading == next(iter(columns)) else "right")
    for row in results:
        table.add_row(*(show(row) for show in columns.values()))
    console = Console(stderr=True)
    console.width = max(console.width, 0 if console.is_terminal else 140)
    console.print(table)


def milliseconds(times: Mapping[str, float]) -> str:
    """Returns a spread as text: the median, and in brackets the quartiles."""
    median, q1, q3 = (1000 * times[name] for name in ("median", "q1", "q3"))
    return f"{median:.4g} ms ({q1:.4g} to {q3:.4g})"


def most_memory(row: Mapping[str, Any]) -> str:
    """Returns a row's ``peak_memory`` as text: of the device if any, else of the process."""
    peak = row.get("peak_memory", {})
    used = peak.get("device", peak.get("process"))
    return "" if used is None else f"{used / 2**30:.2f} GiB"


def processor() -> str:
    """Returns the name of the processor, shortened: Intel Xeon."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        name = next(line.split(":")[1] for line in file if line.startswith("model name"))
        return " ".join(re.sub(r"\((R|TM)\)|\bProcessor\b|\bCPU\b", "", name).split())
    return platform.machine()


def vector_instructions() -> str | None:
    """Returns the widest ones that Linux names of an x86 processor: AVX-512 with AMX, or less."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    known = {"amx_tile": "AVX-512 and AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
    flags = facts.get("flags", "").split()
    found = next((name for flag, name in known.items() if flag in flags), None)
    # Zen 4, of family 25, computes them in two halves; Zen 5 whole, twice as fast.
    is_zen_5 = facts.get("vendor_id") == "AuthenticAMD" and int(facts["cpu family"]) >= 26
    return "AVX-512 of full width" if found == "AVX-512" and is_zen_5 else found


def _gpus() -> list[str]:
    """Returns name, memory and driver of each NVIDIA GPU."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = [
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version",
            "--format=csv,noheader",
        ]
        listed = subprocess.run(query, capture_output=True, text=True, check=True)
        return listed.stdout.strip().splitlines()
    return []


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be positive: got {value}")
    return value
