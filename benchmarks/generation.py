"""Times generation by jaxformer, transformers and torch_ref in turn, in one process.

    uv run --group test python benchmarks/generation.py

All write the same number of tokens, greedily, from the same prompts and the same weights, those of
a GPT-2 of transformers. transformers runs its own ``generate`` with its cache and its fused
attention; compiled it has a static cache, and ``generate`` compiles the decoding step itself.
torch_ref has its fused attention, with a cache and without; torch is in inference mode, with
as many threads as there are cores. Without a cache a text of many rows takes minutes, so that side
is timed once for each size, and its memory is not measured. Peak memory is that of a process that
runs only one side; on a GPU it is left out. In bfloat16 a text can differ from a near tie on.
"""

import argparse
import copy
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import measure
import numpy as np
import shapes
from limits import measure_limits

JAXFORMER, TRANSFORMERS, COMPILED = "jaxformer", "transformers", "transformers compiled"
CACHED, UNCACHED = "torch_ref", "torch_ref without cache"
SIDES = (JAXFORMER, TRANSFORMERS, COMPILED, CACHED, UNCACHED)
CPU_SIDES = (JAXFORMER, TRANSFORMERS, CACHED, UNCACHED)
GPU_SIDES = (JAXFORMER, TRANSFORMERS, COMPILED)
Write = Callable[[np.ndarray, int], np.ndarray]


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=7)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32], help="sequences")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to write")
    shapes.add_arguments(parser)
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--only", action="append", choices=SIDES,
        help="a side that takes part, once for each; default those that suit the device",
    )  # fmt: skip
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    reference = make_gpt2(arguments)
    longest = arguments.prompt + arguments.tokens
    if arguments.memory_of is not None:
        name, batch = arguments.memory_of
        make_side(name, reference, longest)(prompts(arguments, int(batch)), arguments.tokens)
        print(json.dumps(measure.peak_memory()))
        return

    limits = measure_limits([arguments.dtype])
    suited = GPU_SIDES if measure.on_gpu() else CPU_SIDES
    names = [name for name in SIDES if name in (arguments.only or suited)]
    writers = {name: make_side(name, reference, longest) for name in names}
    results: list[dict[str, Any]] = []
    speedups = {}
    for batch in arguments.batch_sizes:
        prompt = prompts(arguments, batch)
        rows = time_sides(writers, prompt, arguments.tokens, arguments.turns)
        least = bytes_per_step(reference, batch, arguments) / limits["memory"]["read"]
        for row in rows:
            steps_per_second = row["tokens_per_second"] / batch
            row["share_of_bandwidth_limit"] = measure.rounded(least * steps_per_second)
            if not arguments.no_memory and not measure.on_gpu() and row["side"] != UNCACHED:
                only = ["--memory-of", row["side"], str(batch)]
                row["peak_memory"] = measure.child([__file__, *sys.argv[1:], *only])
        if rows[0]["side"] == JAXFORMER:
            candidate = rows[0]["tokens_per_second"]
            speedups[batch] = {
                row["side"]: measure.rounded(candidate / row["tokens_per_second"])
                for row in rows[1:]
            }
        results += rows
    measure.write("generation", arguments, results, COLUMNS, limits=limits, speedup=speedups)


def time_sides(
    writers: Mapping[str, Write], prompt: np.ndarray, tokens: int, turns: int
) -> list[dict[str, Any]]:
    """Returns a row for each side: times of the text and its first token, and if texts agree."""
    texts: dict[str, np.ndarray] = {}

    def call(name: str, tokens: int) -> None:
        texts[name] = writers[name](prompt, tokens)

    def calls(names: Sequence[str], tokens: int) -> dict[str, Callable[[], None]]:
        return {name: functools.partial(call, name, tokens) for name in names}

    first = measure.interleave(calls(list(writers), 1), 3 * turns)
    quick = [name for name in writers if name != UNCACHED]
    # The second call of a program records CUDA's graphs.
    times = measure.interleave(calls(quick, tokens), turns, warm_up=2)
    if UNCACHED in writers:
        slow = measure.seconds_of(functools.partial(call, UNCACHED, tokens))
        times[UNCACHED] = {
            "first_call": first[UNCACHED]["first_call"],
            "seconds": measure.spread([slow]),
        }
    return [
        {
            "side": name,
            "batch": len(prompt),
            "seconds": times[name]["seconds"],
            "first_token_seconds": first[name]["seconds"],
            "first_call_seconds": {
                "first_token": first[name]["first_call"],
                "text": times[name]["first_call"],
            },
            "tokens_per_second": measure.rounded(
                len(prompt) * tokens / times[name]["seconds"]["median"]
            ),
            "same_tokens": float(np.mean(texts[name] == next(iter(texts.values())))),
        }
        for name in writers
    ]


def make_gpt2(arguments: argparse.Namespace) -> Any:
    """Returns transformers' GPT-2 with its initial weights, on the CPU and in evaluation mode."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    measure.torch_device()  # pins torch's threads
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=arguments.vocab_size,
        n_positions=arguments.context_length,
        n_embd=arguments.width,
        n_layer=arguments.layers,
        n_head=arguments.heads,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval().to(getattr(torch, arguments.dtype))


def prompts(arguments: argparse.Namespace, batch: int) -> np.ndarray:
    """Returns random ids, (batch, tokens of the prompt)."""
    rng = np.random.default_rng(0)
    return rng.integers(0, arguments.vocab_size, (batch, arguments.prompt))


def make_side(name: str, reference: Any, longest: int) -> Write:
    """Returns a function from a prompt (B, T) and a number of tokens to those tokens.

    Args:
        name: of ``SIDES``.
        reference: the model, which stays where it is.
        longest: the most tokens of prompt and text together.
    """
    import torch

    device = measure.torch_device()
    if name in (TRANSFORMERS, COMPILED):
        from transformers import CompileConfig

        model = copy.deepcopy(reference).to(device)
        settings: dict[str, Any] = {}
        if name == COMPILED:
            # One length of the cache, so that a text of one token compiles nothing anew; every
            # batch size its own program. On a CPU generate compiles only if it is forced to.
            compiling = CompileConfig(dynamic=False)
            compiling._compile_all_devices = True
            settings = {
                "cache_implementation": "static",
                "max_cache_len": longest,
                "compile_config": compiling,
            }

        def write(prompt: np.ndarray, tokens: int) -> np.ndarray:
            ids = torch.from_numpy(prompt).to(device)
            # Compiled code records views of the cache, which inference mode does not let it.
            with torch.no_grad() if settings else torch.inference_mode():
                whole = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=tokens,
                    do_sample=False,
                    use_cache=True,
                    **settings,
                )
            return np.asarray(whole[:, prompt.shape[1] :].cpu())

        return write

    from jaxformer.porting import export_arrays, from_torch

    candidate = from_torch(reference)
    if name == JAXFORMER:
        from jaxformer.generation import generate

        return functools.partial(generate, candidate, greedy=True)

    import torch_ref.config
    import torch_ref.generation
    import torch_ref.transformer_lm
    from jaxformer.parameters import get_parameters

    twin = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**candidate.config.settings())
    )
    arrays = export_arrays(get_parameters(candidate))
    twin.load_state_dict(
        {path: torch.from_numpy(a.astype(np.float32)) for path, a in arrays.items()}
    )
    twin.to(device, reference.dtype)

    def write_by_twin(prompt: np.ndarray, tokens: int) -> np.ndarray:
        with torch.inference_mode():
            made = torch_ref.generation.generate(
                twin,
                torch.from_numpy(prompt).to(device),
                tokens,
                greedy=True,
                use_cache=name == CACHED,
            )
        return made.cpu().numpy()

    return write_by_twin


def bytes_per_step(reference: Any, batch: int, arguments: argparse.Namespace) -> float:
    """Returns the bytes that one step must read: all matrices, and the average keys and values.

    Of the table of positions, and of the tokens' as an input, it is a row each, which is left out.
    """
    weights = (
        sum(p.numel() for p in reference.parameters()) - reference.transformer.wpe.weight.numel()
    )
    mean_length = arguments.prompt + arguments.tokens / 2
    cache = 2 * arguments.layers * arguments.width * mean_length * batch
    size: int = reference.dtype.itemsize
    return size * (weights + cache)


def _memory(row: Mapping[str, Any]) -> str:
    peak = row.get("peak_memory", {})
    used = peak.get("device", peak.get("process"))
    return "" if used is None else f"{used / 2**30:.2f} GiB"


COLUMNS = {
    "side": lambda row: row["side"],
    "sequences": lambda row: str(row["batch"]),
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "text": lambda row: measure.milliseconds(row["seconds"]),
    "first token": lambda row: measure.milliseconds(row["first_token_seconds"]),
    "of the bandwidth": lambda row: f"{row['share_of_bandwidth_limit']:.0%}",
    "memory": _memory,
    "same text": lambda row: f"{row['same_tokens']:.0%}",
}

if __name__ == "__main__":
    main()
