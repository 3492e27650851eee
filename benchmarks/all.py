"""Runs every benchmark that fits this machine, one after the other, and writes the documents.

    uv run --group test --group peers python benchmarks/all.py

Results go to benchmarks/results, named after benchmark, preset and processor or GPU, so that those
of several machines stand side by side; on a machine with a GPU that JAX sees, the GPU's benchmarks
are run in place of the CPU's. One that fails is named at the end, with exit code 1, and does not
stop the others.
"""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import measure

# From the repository's root, where the scripts are run.
RESULTS = Path("benchmarks/results")
CPU = {
    "training_step-nano": "training_step.py --preset nano --turns 61",
    "training_step-baby": "training_step.py --preset baby --turns 9",
    "training_step-char-lm": "training_step.py --preset char-lm --turns 5",
    "training_step-gpt2-small": "training_step.py --preset gpt2-small --turns 3",
    "evaluation-nano": "evaluation.py --preset nano",
    "evaluation-baby": "evaluation.py --preset baby",
    "generation": "generation.py",
    "choosing": "choosing.py",
    "products": "products.py",
    "narrow_weights": "narrow_weights.py",
    "many_requests": "many_requests.py",
    "drafts": "drafts.py",
    "families": "families.py",
    "growth": "growth.py",
    "peers-nano": "peers.py --preset nano",
    "peers-baby": "peers.py --preset baby --turns 5",
    "peers-baby-no-dropout": "peers.py --preset baby --no-dropout --turns 5",
    "peers-gpt2-small": "peers.py --preset gpt2-small --no-dropout --turns 3 --starts 1",
    "start_up-nano": "start_up.py --preset nano",
    "time_to_loss-nano": "time_to_loss.py --preset nano",
    "porting": "porting.py",
    "checkpointing-baby": "checkpointing.py --preset baby",
    "tokenizing": "tokenizing.py --kills 10",
    "token_folders-nano": "token_folders.py --preset nano --gigabytes 10",
}
GPU = {
    "training_step-gpt2-small": "training_step.py --preset gpt2-small --dtype bfloat16"
    " --no-attention-dropout --turns 7",
    "training_step-gpt2-small-dropout": "training_step.py --preset gpt2-small --dtype bfloat16"
    " --batch-size 16 --turns 7",
    "training_step-baby": "training_step.py --preset baby --dtype bfloat16",
    "training_step-nano": "training_step.py --preset nano",
    "evaluation-gpt2-small": "evaluation.py --preset gpt2-small --dtype bfloat16",
    "generation-gpt2-small": "generation.py --dtype bfloat16 --layers 12 --width 768 --heads 12"
    " --vocab-size 50257",
    "checkpointing-baby": "checkpointing.py --preset baby --dtype bfloat16",
    "start_up-nano": "start_up.py --preset nano",
    "time_to_loss-baby": "time_to_loss.py --preset baby --dtype bfloat16 --interval 50 --turns 3",
    "time_to_loss-char-lm": "time_to_loss.py --preset char-lm --dtype bfloat16 --target 1.51"
    " --interval 50 --steps 2000 --turns 3",
}


def main() -> None:
    """Runs the benchmarks of this machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=[], help=f"of {', '.join(dict(CPU, **GPU))}"
    )
    parser.add_argument(
        "--turns", type=int, help="of each, in place of its own number: 1 to see that they run"
    )
    parser.add_argument(
        "--out", type=Path, default=measure.ROOT / RESULTS, help="folder for the results"
    )
    parser.add_argument("--dry", action="store_true", help="print the commands and run nothing")
    arguments = parser.parse_args()

    device = measure.child(["-c", FIND_DEVICE])
    runs = CPU if device["platform"] == "cpu" else GPU
    if unknown := sorted(set(arguments.only) - set(runs)):
        parser.error(f"--only {' '.join(unknown)}: on this device there is {', '.join(runs)}")
    suffix = _slug(measure.processor() if device["platform"] == "cpu" else device["kind"])
    folder = arguments.out.resolve()
    folder = folder.relative_to(measure.ROOT) if folder.is_relative_to(measure.ROOT) else folder
    failed = []
    for name in arguments.only or runs:
        script, *rest = shlex.split(runs[name])
        if arguments.turns is not None:
            rest += ["--turns", str(arguments.turns)]
        rest += ["--out", str(folder / f"{name}-{suffix}.json")]
        command = [sys.executable, f"benchmarks/{script}", *rest]
        print(shlex.join(command), file=sys.stderr, flush=True)
        if not arguments.dry and subprocess.run(command, cwd=measure.ROOT, check=False).returncode:
            failed.append(name)
    if not arguments.dry and folder == RESULTS:
        subprocess.run([sys.executable, "benchmarks/table.py"], cwd=measure.ROOT, check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _slug(kind: str) -> str:
    """Returns a name for files: nvidia-h100-80gb-hbm3 of NVIDIA H100 80GB HBM3."""
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


FIND_DEVICE = """
import json, jax
device = jax.devices()[0]
print(json.dumps({"platform": device.platform, "kind": device.device_kind}))
"""

if __name__ == "__main__":
    main()
