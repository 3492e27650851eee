"""Times ``jaxformer tokenize`` beside the package ``tokenizers`` alone, and kills it at random.

    uv run --group test python benchmarks/tokenizing.py --megabytes 2000 --kills 10

A text of lines of python-docs in random order, one word in twenty made of random letters, is
written to a temporary folder, which is removed. ``tokenizers`` encodes the same text in as many
processes, which share its pieces and keep nothing. Seconds of the processors are given too: they
depend less on what else the machine does.
"""

import hashlib
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measure
import numpy as np

VOCABULARY = 8192


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=1)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        text, tokenizer = write_text(folder, arguments.megabytes)
        size = text.stat().st_size
        results = []
        for turn in range(arguments.turns):
            for side in ("tokenizers", "jaxformer")[:: 1 if turn % 2 else -1]:
                before = processor_seconds()
                begin = time.perf_counter()
                if side == "jaxformer":
                    out = folder / f"out{turn}"
                    peak = run_jaxformer(text, tokenizer, out, arguments.workers)
                else:
                    peak = run_library(text, tokenizer, arguments.workers)
                seconds = time.perf_counter() - begin
                results.append(
                    {
                        "side": side,
                        "turn": turn,
                        "seconds": measure.rounded(seconds),
                        "processor_seconds": measure.rounded(processor_seconds() - before),
                        "bytes_per_second": measure.rounded(size / seconds),
                        "peak_bytes_per_process": peak,
                    }
                )
        same = None
        if arguments.kills:
            same = kill(text, tokenizer, folder, arguments.workers, arguments.kills)
        measure.write(
            "tokenizing", arguments, results, COLUMNS,
            bytes=size, kills=same, ratio=ratios(results),
        )  # fmt: skip


def ratios(results: list[dict]) -> dict[str, float]:
    """Returns the library's time over jaxformer's, the best turn of each: 1 is as fast."""
    return {
        name: measure.rounded(
            min(r[name] for r in results if r["side"] == "tokenizers")
            / min(r[name] for r in results if r["side"] == "jaxformer")
        )
        for name in ("seconds", "processor_seconds")
    }


def write_text(folder: Path, megabytes: int) -> tuple[Path, Path]:
    """Writes the text, and a tokenizer like GPT-2's of its first megabytes."""
    from jaxformer.data.corpora import load_corpus
    from jaxformer.data.encoders import train_bpe

    generator = random.Random(0)
    lines = [line for line in load_corpus("python-docs").text.splitlines() if line]
    letters = "abcdefghijklmnopqrstuvwxyz"
    path = folder / "text.txt"
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1_000_000:
            words = " ".join(generator.choices(lines, k=200)).split(" ")
            for place in range(0, len(words), 20):
                words[place] = "".join(generator.choices(letters, k=generator.randint(3, 12)))
            file.write(" ".join(words).replace(". ", ".\n") + "\n")
    sample = path.open(encoding="utf-8").read(3_000_000)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(train_bpe(iter([sample]), VOCABULARY).tokenizer or "")
    return path, tokenizer


def command(text: Path, tokenizer: Path, out: Path, workers: int) -> list[str]:
    """Returns the command of jaxformer."""
    arguments = [text, "--tokenizer", tokenizer, "--out", out, "--workers", workers]
    return [sys.executable, "-m", "jaxformer", "tokenize", *map(str, arguments)]


def run_jaxformer(text: Path, tokenizer: Path, out: Path, workers: int) -> int:
    """Runs the command; returns the most memory that one of its processes had, in bytes."""
    process = subprocess.Popen(
        command(text, tokenizer, out, workers),
        cwd=measure.ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    peak = 0
    while process.poll() is None:
        peak = max([peak, *(peak_of(pid) for pid in family(process.pid))])
        time.sleep(0.1)
    if process.returncode:
        raise RuntimeError(f"jaxformer tokenize ended with {process.returncode}")
    return peak


def family(pid: int) -> list[int]:
    """Returns a process and its children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *map(int, children)]


def peak_of(pid: int) -> int:
    """Returns the most memory that a process has had, in bytes; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM:")), 0)


def run_library(text: Path, tokenizer: Path, workers: int) -> int:
    """Encodes the text in processes that share its pieces; returns the most memory of one."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool:
        arguments = [(text, tokenizer, number, workers) for number in range(workers)]
        return max(pool.starmap(encode_share, arguments))


def encode_share(text: Path, tokenizer: Path, number: int, workers: int) -> int:
    """Encodes every so many-th piece of a text; returns the most memory, in bytes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(str(tokenizer))
    with text.open(encoding="utf-8") as file:
        place = 0
        while piece := file.read(1 << 17):
            if place % workers == number:
                encoded = encoder.encode_batch_fast([piece], add_special_tokens=False)
                np.array(encoded[0].ids, np.uint16)
            place += 1
    return peak_of(os.getpid())


def kill(text: Path, tokenizer: Path, folder: Path, workers: int, kills: int) -> dict:
    """Kills the command at random moments, and compares what it leaves with a run uncut."""
    generator = random.Random(0)
    out, done = folder / "killed", 0
    whole = folder / "out0"
    while True:
        process = subprocess.Popen(
            command(text, tokenizer, out, workers),
            cwd=measure.ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            if process.wait(3 + 12 * generator.random() if done < kills else None):
                raise RuntimeError(f"jaxformer tokenize ended with {process.returncode}")
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            done += 1
    return {"kills": done, "identical": digests(whole) == digests(out)}


def digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file of a folder."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def processor_seconds() -> float:
    """Returns what this process's children have used of the processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


COLUMNS = {
    "side": lambda row: row["side"],
    "MB/s": lambda row: f"{row['bytes_per_second'] / 1e6:.2f}",
    "processor s": lambda row: f"{row['processor_seconds']:.1f}",
    "peak of a process": lambda row: f"{row['peak_bytes_per_process'] / 2**20:.0f} MiB",
}

if __name__ == "__main__":
    measure.run(main)
