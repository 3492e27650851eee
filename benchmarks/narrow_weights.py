"""Times text from a model whose weights are stored in float32, bfloat16 and int8, in turn.

    uv run --group test python benchmarks/narrow_weights.py

All write the same number of tokens, greedily, from the same prompts, with the initial weights of a
GPT-2 of the given shape. Weights count as they lie in memory; the embedding is among them, which
stays in float32 and is the output head. Processor seconds are those of all threads: on a busy
machine they say more than the clock.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import measure
import numpy as np
import shapes

OWN, NARROW = "float32", ("bfloat16", "int8")


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=7)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 32], help="sequences")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to write")
    shapes.add_arguments(parser, layers=12, width=768, heads=12, vocab_size=50257)
    arguments = parser.parse_args()

    from jaxformer import narrow_weights
    from jaxformer.parameters import get_parameters

    own = shapes.make_model(arguments)
    models = {OWN: own, **{dtype: narrow_weights(own, dtype) for dtype in NARROW}}
    sizes = {
        name: sum(array.nbytes for array in get_parameters(model).values())
        for name, model in models.items()
    }
    results: list[dict[str, Any]] = []
    speedups = {}
    for batch in arguments.batch_sizes:
        prompt = np.random.default_rng(0).integers(
            0, arguments.vocab_size, (batch, arguments.prompt)
        )
        rows = time_sides(models, prompt, arguments.tokens, arguments.turns)
        for row in rows:
            row["weights_bytes"] = sizes[row["side"]]
        speedups[batch] = {
            row["side"]: measure.rounded(row["tokens_per_second"] / rows[0]["tokens_per_second"])
            for row in rows[1:]
        }
        results += rows
    measure.write("narrow_weights", arguments, results, COLUMNS, speedup=speedups)


def time_sides(
    models: Mapping[str, Any], prompt: np.ndarray, tokens: int, turns: int
) -> list[dict[str, Any]]:
    """Returns a row for each storage of the weights."""
    from jaxformer import generate

    processor: dict[str, list[float]] = {name: [] for name in models}

    def call(name: str, count: int) -> None:
        before = measure.processor_seconds()
        generate(models[name], prompt, count, greedy=True)
        if count == tokens:
            processor[name].append(measure.processor_seconds() - before)

    def calls(count: int) -> dict[str, Callable[[], None]]:
        return {name: functools.partial(call, name, count) for name in models}

    first = measure.interleave(calls(1), turns)
    times = measure.interleave(calls(tokens), turns)
    return [
        {
            "side": name,
            "batch": len(prompt),
            "seconds": times[name]["seconds"],
            "first_token_seconds": first[name]["seconds"],
            "processor_seconds": measure.spread(processor[name][1:]),
            "tokens_per_second": measure.rounded(
                len(prompt) * tokens / times[name]["seconds"]["median"]
            ),
        }
        for name in models
    ]


COLUMNS = {
    "weights": lambda row: row["side"],
    "size": lambda row: f"{row['weights_bytes'] / 2**20:,.0f} MiB",
    "sequences": lambda row: str(row["batch"]),
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.1f}",
    "text": lambda row: measure.milliseconds(row["seconds"]),
    "processor": lambda row: measure.milliseconds(row["processor_seconds"]),
    "first token": lambda row: measure.milliseconds(row["first_token_seconds"]),
}

if __name__ == "__main__":
    main()
