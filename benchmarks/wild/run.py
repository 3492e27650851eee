"""Compares the settings of some families and prints a line of JSON for each.

    python -m benchmarks.wild.run transformers Bert GPT2

It runs in an environment that has the packages; ``docs/write_wild.py`` makes one.
"""

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.simplefilter("ignore")


def restore_removed_names():
    """Gives JAX the keywords that it had when these packages were published.

    ``jax.numpy.clip`` had a_min and a_max; JAX 0.4.27 renamed them.
    """
    import jax.numpy as jnp

    clip = jnp.clip

    def clip_as_before(arr, *args, a_min=None, a_max=None, **kwargs):
        for name, bound in (("min", a_min), ("max", a_max)):
            if bound is not None:
                kwargs[name] = bound
        return clip(arr, *args, **kwargs)

    jnp.clip = clip_as_before


def measure(pair):
    """Returns what a comparison found, and how far the two models are apart as people run them."""
    from jaxformer.parity import compare

    started = time.perf_counter()
    report = compare(pair.reference, pair.candidate, pair.inputs, jax_inputs=pair.jax_inputs)
    seconds = time.perf_counter() - started
    return {
        "verdict": report.verdict,
        "effect": in_float32(pair),
        "causes": [
            {
                "jax": shorten(cause.jax_source), "torch": shorten(cause.torch_source),
                "diagnosis": cause.diagnosis, "error": cause.error,
                "effect": cause.effect, "places": cause.places,
            }
            for cause in report.root_causes
        ],
        "weights": list(report.weights),
        "tables": len(report.tables),
        "remarks": list(report.remarks),
        "incomplete": list(report.incomplete),
        "coverage": report.coverage.operators,
        "error": report.error,
        "seconds": round(seconds, 1),
        "text": str(report),
    }  # fmt: skip


def in_float32(pair):
    """Returns the largest difference of the results over their scale, with no debugger at all."""
    import jax
    import numpy as np
    import torch

    given = {n: torch.from_numpy(np.asarray(x)) for n, x in pair.inputs.items()}
    with torch.no_grad():
        right = pair.reference(**given)
    function, params = pair.candidate
    own = jax.jit(function)(params, **(pair.jax_inputs or pair.inputs))
    largest = 0.0
    for place, (one, other) in enumerate(
        zip(jax.tree.leaves(own), jax.tree.leaves(right), strict=True)
    ):
        one, other = np.asarray(one, np.float64), other.double().numpy()
        if one.shape != other.shape:
            return None
        if pair.seen is not None and place == 0:
            seen = np.asarray(pair.seen, bool)
            one, other = one[seen], other[seen]
        largest = max(largest, float(np.abs(one - other).max() / np.abs(other).max()))
    return largest


def shorten(source):
    """Returns a "path:line" from the package on."""
    return source.rpartition("site-packages/")[2]


def main():
    """Compares what the command names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("families", nargs="*", help="default all")
    parser.add_argument("--setting", help="this one alone")
    parser.add_argument("--mode", help="this one alone")
    parser.add_argument("--text", action="store_true", help="print the reports")
    parser.add_argument("--done", help="a file of lines: what it has is not compared again")
    parser.add_argument("--trace", action="store_true", help="print where a comparison failed")
    args = parser.parse_args()
    restore_removed_names()
    from benchmarks.wild.all_settings import all_settings

    found = [s for s in all_settings() if s.library == args.library]
    unknown = set(args.families) - {s.family for s in found}
    if unknown or not found:
        sys.exit(f"{args.library} has no {', '.join(sorted(unknown)) or 'settings'}")
    found = [s for s in found if not args.families or s.family in args.families]
    import torch

    torch.set_num_threads(1)
    lines = Path(args.done).read_text("utf-8").splitlines() if args.done else []
    done = {tuple(json.loads(line)[n] for n in ("family", "setting", "mode")) for line in lines}
    # Each family once, before how its texts are padded and generated.
    for is_first in (True, False):
        for setting, mode, build in (
            (s, mode, build) for s in found for mode, build in s.modes.items()
        ):
            if (mode == "forward") is not is_first or (setting.family, setting.name, mode) in done:
                continue
            if args.setting not in (None, setting.name) or args.mode not in (None, mode):
                continue
            row = {"library": setting.library, "family": setting.family, "setting": setting.name,
                   "mode": mode}  # fmt: skip
            try:
                row |= measure(build())
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)
                where = [f for f in last if "benchmarks/wild" not in f.filename][-1:]
                row |= {
                    "verdict": "failed",
                    "reason": f"{type(error).__name__}: {error}".strip().splitlines()[0],
                    "where": [shorten(f"{f.filename}:{f.lineno}") for f in where],
                }
                if args.trace:
                    traceback.print_exc()
            text = row.pop("text", "")
            if args.text:
                print("#", setting.name, "|", mode, "|", row.get("effect"), row.get("seconds"))
                print(text or row, flush=True)
            else:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
