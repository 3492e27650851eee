"""Times matrix products by XLA, jaxformer and torch's library, in turn, on one CPU device.

    uv run --group test python benchmarks/products.py

They are the products of a feed-forward in training: x W of the pass forward, dy Wᵀ and xᵀ dy of the
one back, at the widths of presets. Each program makes some of them in a loop, one after the other.
"""

import functools
from collections.abc import Callable
from typing import Any

import measure
import numpy as np

# Rows, inputs and outputs: what a core of two computes of nano, and baby, char-lm and gpt2-small.
SHAPES = {
    "nano": (512, 128, 512),
    "baby": (2048, 384, 1536),
    "char-lm": (512, 768, 3072),
    "gpt2-small": (1024, 768, 3072),
}
FORMS = ("x W", "dy Wᵀ", "xᵀ dy")
JAXFORMER, XLA = "jaxformer", "XLA"
# Of one program.
OPERATIONS = 2e10


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=11)
    parser.add_argument("--presets", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    arguments = parser.parse_args()

    results: list[dict[str, Any]] = []
    speedups: dict[str, dict[str, float]] = {}
    for preset in arguments.presets:
        for form in FORMS:
            rows = time_products(preset, form, arguments.turns)
            results += rows
            own = next(row for row in rows if row["side"] == JAXFORMER)["seconds"]["median"]
            speedups[f"{preset}, {form}"] = {
                row["side"]: measure.rounded(row["seconds"]["median"] / own)
                for row in rows
                if row["side"] != JAXFORMER
            }
    measure.write("products", arguments, results, COLUMNS, speedup=speedups)


def time_products(preset: str, form: str, turns: int) -> list[dict[str, Any]]:
    """Returns a row for each side that can be had here: the time of a product."""
    import jax.numpy as jnp

    from jaxformer.execution.called_products import product
    from jaxformer.hardware.matrix_products import LIBRARIES, are_registered

    operations = 2 * np.prod(SHAPES[preset], dtype=float)
    count = max(1, round(OPERATIONS / operations))
    sides: dict[str, Callable[[Any, Any], Any]] = {XLA: jnp.matmul}
    for library in filter(are_registered, LIBRARIES):
        sides[library] = functools.partial(product, library)
    calls = {name: make_program(call, SHAPES[preset], form, count) for name, call in sides.items()}
    times = measure.interleave(calls, turns)
    return [
        {
            "preset": preset,
            "product": form,
            "side": name,
            "seconds": (seconds := measure.scaled(found["seconds"], 1 / count)),
            "flops": measure.rounded(operations / seconds["median"]),
        }
        for name, found in times.items()
    ]


def make_program(
    multiply: Callable[[Any, Any], Any], shape: tuple[int, int, int], form: str, count: int
) -> Callable[[], Any]:
    """Returns what makes so many products of a form, compiled."""
    import jax

    rows, inputs, outputs = shape
    random = np.random.default_rng(0)
    sizes = (rows, inputs), (inputs, outputs), (rows, outputs)
    x, kernel, dy = (random.standard_normal(size, np.float32) for size in sizes)

    def make(x: Any, kernel: Any, dy: Any) -> Any:
        if form == "x W":
            return multiply(x, kernel)
        # XLA leaves out the pass forward, whose result is not used.
        back = jax.vjp(multiply, x, kernel)[1](dy)
        return back[0] if form == "dy Wᵀ" else back[1]

    @jax.jit
    def run(x: Any, kernel: Any, dy: Any) -> Any:
        def turn(_: Any, arrays: tuple[Any, Any]) -> tuple[Any, Any]:
            x, dy = arrays
            small = 1e-30 * make(x, kernel, dy)[0, 0]
            # The next product waits for this one, and no number is changed.
            return x.at[0, 0].add(small), dy.at[0, 0].add(small)

        return jax.lax.fori_loop(0, count, turn, (x, dy))

    arrays = jax.device_put((x, kernel, dy), jax.devices()[0])
    return lambda: jax.block_until_ready(run(*arrays))


COLUMNS = {
    "shape of": lambda row: row["preset"],
    "product": lambda row: row["product"],
    "side": lambda row: row["side"],
    "time": lambda row: measure.milliseconds(row["seconds"]),
    "GFLOP/s": lambda row: f"{row['flops'] / 1e9:.0f}",
}

if __name__ == "__main__":
    measure.run(main)
