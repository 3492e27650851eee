"""Times the choice of the next token beside JAX's own functions, in turn.

    uv run --group test python benchmarks/choosing.py

Each program makes a number of tokens in a loop, as generation does: the product of one row for each
text with a table of embeddings, and the choice. "most probable" is beside ``jnp.argmax``, "drawn"
beside ``jax.random.categorical``; both sides choose the same tokens. The product alone, of which
nothing but the first logits is read, is timed too.
"""

import functools
from collections.abc import Callable
from typing import Any

import measure
import numpy as np

OWN, JAX, PRODUCT = "jaxformer", "jax", "product"


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=11)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16, 32], help="texts")
    parser.add_argument("--vocab-size", type=int, default=50257, help="ids")
    parser.add_argument("--width", type=int, default=256, help="of an embedding")
    parser.add_argument("--tokens", type=int, default=16, help="of each text")
    arguments = parser.parse_args()

    results: list[dict[str, Any]] = []
    speedups: dict[str, dict[str, float]] = {}
    for batch in arguments.batch_sizes:
        times = time_choices(batch, arguments)
        results += [{"choice": choice, "batch": batch, **row} for choice, row in times]
        taken = {(choice, row["side"]): row["seconds"]["median"] for choice, row in times}
        for choice in ("most probable", "drawn"):
            ratio = taken[choice, JAX] / taken[choice, OWN]
            speedups.setdefault(choice, {})[str(batch)] = measure.rounded(ratio)
    measure.write("choosing", arguments, results, COLUMNS, speedup=speedups)


def time_choices(batch: int, arguments: Any) -> list[tuple[str, dict[str, Any]]]:
    """Returns for each choice a row for each side: the time of a product and a token."""
    import jax
    import jax.numpy as jnp

    from jaxformer.execution import few_rows
    from jaxformer.logits import draw, most_probable

    random = np.random.default_rng(0)
    table = jnp.asarray(random.normal(size=(arguments.vocab_size, arguments.width)), jnp.float32)
    rows = jnp.asarray(random.normal(size=(batch, arguments.width)), jnp.float32)

    def write(choose: Callable[[Any, Any], Any]) -> Any:
        @jax.jit
        def made(rows: Any, table: Any) -> Any:
            def step(number: Any, state: Any) -> Any:
                x, chosen = state
                # One row has a product of XLA's own, as in generation.
                logits = few_rows.product(x, table) if few_rows.is_few(batch) else x @ table.T
                token = choose(jax.random.fold_in(jax.random.key(0), number), logits)
                # The next product waits for the token.
                return x + 1e-9 * token[:, None].astype(x.dtype), chosen + token

            start = jnp.zeros(batch, int)
            return jax.lax.fori_loop(0, arguments.tokens, step, (rows, start))[1]

        return functools.partial(made, rows, table)

    programs = {
        ("most probable", OWN): write(lambda _, logits: most_probable(logits)),
        ("most probable", JAX): write(lambda _, logits: jnp.argmax(logits, axis=-1)),
        ("drawn", OWN): write(draw),
        ("drawn", JAX): write(jax.random.categorical),
        ("none", PRODUCT): write(lambda _, logits: logits[:, 0].astype(int)),
    }
    for choice in ("most probable", "drawn"):
        own, other = np.asarray(programs[choice, OWN]()), np.asarray(programs[choice, JAX]())
        if not np.array_equal(own, other):
            raise SystemExit(f"the two sides chose other tokens: {own} and {other}")
    calls = {
        f"{choice}, {side}": functools.partial(lambda made: made().block_until_ready(), made)
        for (choice, side), made in programs.items()
    }
    times = measure.interleave(calls, arguments.turns)
    return [
        (
            choice,
            {
                "side": side,
                "seconds": measure.scaled(
                    times[f"{choice}, {side}"]["seconds"], 1 / arguments.tokens
                ),
            },
        )
        for choice, side in programs
    ]


COLUMNS = {
    "choice": lambda row: row["choice"],
    "side": lambda row: row["side"],
    "texts": lambda row: str(row["batch"]),
    "token": lambda row: measure.milliseconds(row["seconds"]),
}

if __name__ == "__main__":
    measure.run(main)
