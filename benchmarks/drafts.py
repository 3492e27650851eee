"""Times text that a model writes alone, and with a draft that writes ahead, in turn.

    uv run --group test python benchmarks/drafts.py

The model has the initial weights of a GPT-2 of the given shape, and its draft is its first layers.
What the other layers add is scaled: by 0 they add nothing, so that the draft is always right.
``agreement`` is how often it is, along the text that the model writes. All write the same number of
tokens, greedily, from the same prompts, and the texts are compared: where two logits lie within
rounding they may differ. Processor seconds are those of all threads: on a busy machine they say
more than the clock.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import measure
import numpy as np
import shapes

ALONE = "alone"


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=3)
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to write")
    parser.add_argument("--draft-layers", type=int, default=2, help="the model's first")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[2, 4], help="of a round")
    parser.add_argument(
        "--scales", type=float, nargs="+", default=[0, 2], help="of what the other layers add"
    )
    shapes.add_arguments(parser, layers=12, width=768, heads=12, vocab_size=50257)
    arguments = parser.parse_args()

    prompt = np.random.default_rng(0).integers(
        0, arguments.vocab_size, (arguments.batch, arguments.prompt)
    )
    results: list[dict[str, Any]] = []
    for scale in arguments.scales:
        model, draft = make_pair(arguments, scale)
        results += time_sides(model, draft, prompt, arguments, scale)
    measure.write("drafts", arguments, results, COLUMNS)


def make_pair(arguments: argparse.Namespace, scale: float) -> tuple[Any, Any]:
    """Returns a model and its draft, which share the weights of the draft's layers."""
    from jaxformer.parameters import get_parameters, set_parameters

    model = shapes.make_model(arguments)
    draft = shapes.make_model(arguments, num_layers=arguments.draft_layers)
    weights = get_parameters(model)
    set_parameters(draft, {name: weights[name] for name in get_parameters(draft)})
    last = [f"blocks.{i}." for i in range(arguments.draft_layers, arguments.layers)]
    adds = ("attention.o_proj.kernel", "feed_forward.down_proj.kernel")
    set_parameters(
        model,
        {
            name: array * scale
            if name in {layer + add for layer in last for add in adds}
            else array
            for name, array in weights.items()
        },
    )
    return model, draft


def time_sides(
    model: Any, draft: Any, prompt: np.ndarray, arguments: argparse.Namespace, scale: float
) -> list[dict[str, Any]]:
    """Returns a row for the model alone, and one for each number of proposed tokens."""
    from jaxformer import generate, generate_with_draft

    texts: dict[str, np.ndarray] = {}
    processor: dict[str, list[float]] = {}

    def call(name: str, write: Callable[[], np.ndarray]) -> None:
        before = measure.processor_seconds()
        texts[name] = write()
        processor.setdefault(name, []).append(measure.processor_seconds() - before)

    settings: dict[str, Any] = {"greedy": True}
    write = {ALONE: functools.partial(generate, model, prompt, arguments.tokens, **settings)}
    for count in arguments.draft_tokens:
        write[f"{count} proposed"] = functools.partial(
            generate_with_draft, model, draft, prompt, arguments.tokens, draft_tokens=count,
            **settings,
        )  # fmt: skip
    sides = {name: functools.partial(call, name, each) for name, each in write.items()}
    times = measure.interleave(sides, arguments.turns)
    tokens = len(prompt) * arguments.tokens
    alone = times[ALONE]["seconds"]["median"]
    return [
        {
            "side": name,
            "scale": scale,
            "agreement": agreement(draft, prompt, texts[ALONE]),
            "seconds": times[name]["seconds"],
            "first_call_seconds": times[name]["first_call"],
            "processor_seconds": measure.spread(processor[name][1:]),
            "tokens_per_second": measure.rounded(tokens / times[name]["seconds"]["median"]),
            "speedup": measure.rounded(alone / times[name]["seconds"]["median"]),
            "same_tokens": float(np.mean(texts[name] == texts[ALONE])),
        }
        for name in sides
    ]


def agreement(draft: Any, prompt: np.ndarray, text: np.ndarray) -> float:
    """Returns at how many tokens of a text the draft's choice is that token, as a share."""
    read = np.concatenate((prompt, text), axis=1)
    chosen = np.argmax(np.asarray(draft(read[:, :-1])), axis=-1)
    return measure.rounded(float(np.mean(chosen[:, prompt.shape[1] - 1 :] == text)))


COLUMNS = {
    "draft": lambda row: row["side"],
    "agreement": lambda row: f"{row['agreement']:.0%}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.1f}",
    "to alone": lambda row: f"{row['speedup']:.2f}",
    "text": lambda row: measure.milliseconds(row["seconds"]),
    "processor": lambda row: measure.milliseconds(row["processor_seconds"]),
    "same tokens": lambda row: f"{row['same_tokens']:.0%}",
}

if __name__ == "__main__":
    main()
