"""Times many requests of different lengths: rows that are taken over, and batches that wait.

    uv run --group test python benchmarks/many_requests.py

Both sides write the same texts greedily, with the same initial weights, and as many rows. One is
``generate_requests``, whose rows are taken by the next request as soon as a text ends. The other
cuts the requests into batches, in their order, pads the prompts of each on the left, and writes as
many tokens as the longest text of the batch needs, as one does without it. Tokens per second count
those that were asked for. The first call of each side compiles; it is reported by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import measure
import numpy as np
import shapes

CONTINUOUS, BATCHES = "continuous", "batches"


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=3)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rows", type=int, nargs="+", default=[8], help="texts at a time")
    parser.add_argument("--longest-prompt", type=int, default=128, help="tokens")
    parser.add_argument("--longest-text", type=int, default=256, help="tokens")
    shapes.add_arguments(parser)
    arguments = parser.parse_args()

    from jaxformer.continuous_generation import Request

    draw = np.random.default_rng(0)
    # As many short ones as long ones on a scale of factors: from 4 tokens to the longest.
    lengths = [
        np.exp(draw.uniform(np.log(4), np.log(most), arguments.requests)).astype(int)
        for most in (arguments.longest_prompt, arguments.longest_text)
    ]
    requests = [
        Request(draw.integers(0, arguments.vocab_size, prompt), int(text))
        for prompt, text in zip(*lengths, strict=True)
    ]
    model = shapes.make_model(arguments)
    results: list[dict[str, Any]] = []
    speedups = {}
    for rows in arguments.rows:
        found = time_sides(model, requests, rows, arguments.turns)
        speedups[rows] = measure.rounded(
            found[0]["tokens_per_second"] / found[1]["tokens_per_second"]
        )
        results += found
    measure.write("many_requests", arguments, results, COLUMNS, speedup=speedups)


def time_sides(model: Any, requests: Sequence[Any], rows: int, turns: int) -> list[dict[str, Any]]:
    """Returns a row for each side."""
    texts: dict[str, list[np.ndarray]] = {}

    def call(name: str, write: Callable[..., list[np.ndarray]]) -> Callable[[], None]:
        def run() -> None:
            texts[name] = write(model, requests, rows)

        return run

    sides = {CONTINUOUS: write_continuously, BATCHES: write_in_batches}
    times = measure.interleave({name: call(name, each) for name, each in sides.items()}, turns)
    tokens = sum(request.num_tokens for request in requests)
    return [
        {
            "side": name,
            "rows": rows,
            "seconds": times[name]["seconds"],
            "first_call_seconds": times[name]["first_call"],
            "tokens": tokens,
            "tokens_per_second": measure.rounded(tokens / times[name]["seconds"]["median"]),
            "same_texts": float(
                np.mean([np.array_equal(a, b) for a, b in zip(*texts.values(), strict=True)])
            ),
        }
        for name in sides
    ]


def write_continuously(model: Any, requests: Sequence[Any], rows: int) -> list[np.ndarray]:
    """Returns the texts, written by rows that are taken over."""
    from jaxformer.continuous_generation import generate_requests

    texts = dict(generate_requests(model, requests, rows=rows, greedy=True))
    return [texts[number] for number in range(len(requests))]


def write_in_batches(model: Any, requests: Sequence[Any], rows: int) -> list[np.ndarray]:
    """Returns the texts, written by batches that wait for their longest."""
    from jaxformer.generation import generate

    texts: list[np.ndarray] = []
    for first in range(0, len(requests), rows):
        batch = requests[first : first + rows]
        width = max(len(request.prompt) for request in batch)
        prompt, mask = np.zeros((len(batch), width), int), np.zeros((len(batch), width), bool)
        for row, is_token, request in zip(prompt, mask, batch, strict=True):
            row[width - len(request.prompt) :] = request.prompt
            is_token[width - len(request.prompt) :] = True
        most = max(request.num_tokens for request in batch)
        made = generate(model, prompt, most, greedy=True, mask=mask)
        texts += [row[: request.num_tokens] for row, request in zip(made, batch, strict=True)]
    return texts


def _first_call(row: Mapping[str, Any]) -> str:
    return f"{row['first_call_seconds']:.3g} s"


COLUMNS = {
    "side": lambda row: row["side"],
    "rows": lambda row: str(row["rows"]),
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "all texts": lambda row: measure.milliseconds(row["seconds"]),
    "first call": _first_call,
    "same texts": lambda row: f"{row['same_texts']:.0%}",
}

if __name__ == "__main__":
    main()
