"""What ``jaxformer inspect`` does: load the run, compute the numbers, write them and a picture."""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer import analysis, costs
from jaxformer.builders import make_block
from jaxformer.cli.inspect_options import (
    AttentionOptions,
    CostsOptions,
    GradientsOptions,
    InitOptions,
    InspectOptions,
    MasksOptions,
    NormsOptions,
    PositionsOptions,
    ScalingOptions,
    TextOptions,
)
from jaxformer.config import TransformerLMConfig
from jaxformer.errors import ResourceError, UsageError
from jaxformer.generation import generate
from jaxformer.hardware.memory import host_memory
from jaxformer.porting.api import build
from jaxformer.porting.checkpoint import Tokenizer, in_float32, language_model, open_checkpoint
from jaxformer.positions import ALiBi, Rotary, SinusoidalPositions
from jaxformer.scaling import softmax_scaling
from jaxformer.training.memory import count_matrices
from jaxformer.transformer_lm import TransformerLM

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A trained model, in evaluation mode, and the tokenizer of its text, where it is known."""

    model: TransformerLM
    known_tokenizer: Tokenizer | None

    @property
    def tokenizer(self) -> Tokenizer:
        """What makes ids of text."""
        if self.known_tokenizer is None:
            raise UsageError(
                "this model has neither a vocabulary nor a tokenizer.json, and text is asked for"
            )
        return self.known_tokenizer

    @property
    def config(self) -> TransformerLMConfig:
        """The model's settings."""
        return self.model.config


def inspect(what: str, options: InspectOptions) -> None:
    """Writes the picture or numbers of one inspection and prints the path of each file.

    Raises:
        UsageError: matplotlib is missing, or a setting does not fit the run.
        CheckpointError: the run has no such checkpoint, or it is damaged.
        TextError: the text holds a character that the model does not know.
        ResourceError: a file cannot be written.
    """
    home = options.path if options.path.is_dir() else options.path.parent
    picture = options.out or home / "inspect" / f"{what}.png"
    drawn = picture.suffix != ".json"
    if drawn and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "a picture needs matplotlib: pip install 'jaxformer[plot]', or write the numbers "
            "alone with --out FILE.json"
        )
    numbers = EXAMINATIONS[what](_load(options), options)
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        if drawn:
            from jaxformer.inspection.pictures import save_picture

            save_picture(what, numbers, picture)
            print(picture)
        if options.json or not drawn:
            path = picture.with_suffix(".json")
            path.write_text(json.dumps(_plain(numbers), ensure_ascii=False, indent=1) + "\n")
            print(path)
    except OSError as error:
        raise ResourceError(f"cannot write {picture}: {error.strerror}") from error


def attention(run: Run, options: AttentionOptions) -> Numbers:
    """``analysis.attention_maps`` of a text, with an axis of layers and one of heads."""
    layers, heads = run.config.num_layers, run.config.num_heads
    _check_index("layer", options.layer, layers)
    if not isinstance(options.head, str):
        _check_index("head", options.head, heads)
    text, ids = _text(run, options)
    head = None if options.head == "all" else options.head
    maps = analysis.attention_maps(
        run.model, jnp.asarray(ids)[None], layer=options.layer, head=head
    )
    shape = (
        layers if options.layer is None else 1,
        heads if head is None else 1,
        len(ids),
        len(ids),
    )
    return {
        "text": text,
        "layers": list(range(layers)) if options.layer is None else [options.layer],
        "heads": list(range(heads)) if head is None else [head],
        "weights": maps.reshape(shape),
    }


def gradients(run: Run, options: GradientsOptions) -> Numbers:
    """``analysis.gradient_norms`` of the logits of a text."""
    text, ids = _text(run, options)
    return {"text": text, "norms": analysis.gradient_norms(run.model, jnp.asarray(ids)[None])}


def init(run: Run, options: InitOptions) -> Numbers:
    """As ``analysis.initialization_comparison`` on random tokens, with a histogram beside it."""
    vocab_size = run.config.vocab_size or run.tokenizer.vocabulary_size()
    shape = (4, run.config.context_length)
    ids = jnp.asarray(np.random.default_rng(options.seed).integers(0, vocab_size, shape, np.int32))
    results: Numbers = {}
    call = nnx.jit(lambda model: model(ids))
    for scheme in analysis.INITIALIZATIONS:
        with analysis.reinitialized(run.model, scheme, options.seed):
            output = np.asarray(call(run.model))
        density, edges = np.histogram(output, bins=60, density=True)
        statistics = analysis.output_statistics(output)
        results[scheme] = {**statistics, "density": density, "edges": edges}
    return results


def norms(run: Run, options: NormsOptions) -> Numbers:
    """``analysis.norm_order_comparison`` of fresh blocks, on standard normals."""
    blocks = [
        make_block(run.config, rngs=nnx.Rngs(options.seed + i)) for i in range(options.layers)
    ]
    for block in blocks:
        block.eval()
    length = min(run.config.context_length, 64)
    x = jax.random.normal(jax.random.key(options.seed), (4, length, run.config.d_model))
    return analysis.norm_order_comparison(blocks, x)


def positions(run: Run, options: PositionsOptions) -> Numbers:
    """``analysis.position_tables``: the model's own, and every fixed scheme in its sizes."""
    config, model = run.config, run.model
    length = options.length or config.context_length
    head_dim = config.head_width
    own = (model.position_embedding, model.blocks[0].attention.position)
    fixed: list[Any] = [ALiBi(config.num_heads)]
    if head_dim % 2 == 0:
        fixed.insert(0, Rotary(head_dim, length, base=config.rotary_base))
    if config.d_model % 2 == 0:
        fixed.insert(0, SinusoidalPositions(length, config.d_model))
    try:
        tables = analysis.position_tables(*own, length=length)
    except ValueError as error:
        raise UsageError(f"--length {length} is too long: {error}") from None
    # What the model has comes first, and as the model has it.
    tables = {**tables, **analysis.position_tables(*fixed, length=length), **tables}
    return {"tables": tables, "dimensions": _choose(tables, options.dimensions)}


def masks(run: Run, options: MasksOptions) -> Numbers:
    """``analysis.mask_tables`` for one row of tokens."""
    length = options.length
    window = options.window or run.config.sliding_window or -(-length // 3)
    padded = length // 4 if options.padded is None else options.padded
    tables = analysis.mask_tables(length, window=window, lengths=[length - padded])
    return {name: table[0] for name, table in tables.items()}


def scaling(run: Run, options: ScalingOptions) -> Numbers:
    """``scaling.softmax_scaling`` for the head sizes asked for and the run's own."""
    own = run.config.head_width
    sizes = sorted({*options.head_sizes, own})
    keys = options.keys or max(2, min(run.config.context_length, 256))
    results = softmax_scaling(sizes, num_keys=keys, seed=options.seed)
    return {"head_sizes": sizes, "keys": keys, **results}


def measure(run: Run, options: CostsOptions) -> Numbers:
    """``costs.measure_blocks`` of the run's block at several widths, and ``costs.fit_costs``."""
    config = run.config
    configs = [
        replace(
            config,
            d_model=config.d_model * times,
            num_heads=config.num_heads * times,
            num_kv_heads=config.num_kv_heads and config.num_kv_heads * times,
            d_ff=config.d_ff and config.d_ff * times,
            context_length=max(options.lengths),
        )
        for times in sorted(set(options.widths))
    ]
    widest = replace(configs[-1], num_layers=1, vocab_size=None, full_attention_layers=())
    weights = 4 * count_matrices(widest)
    # The gradient is as large.
    if 2 * weights > host_memory():
        raise UsageError(
            f"--widths {max(options.widths)}: the weights of the block and their gradient are "
            f"{2 * weights / 2**30:,.0f} GiB, more than there is; give smaller ones"
        )
    measured = costs.measure_blocks(configs, sorted(set(options.lengths)), rounds=options.rounds)
    return {"measured": measured, "fit": costs.fit_costs(measured)}


EXAMINATIONS: dict[str, Callable[[Run, Any], Numbers]] = {
    "attention": attention,
    "gradients": gradients,
    "init": init,
    "norms": norms,
    "positions": positions,
    "masks": masks,
    "scaling": scaling,
    "costs": measure,
}


def _load(options: InspectOptions) -> Run:
    checkpoint = open_checkpoint(options.path, step=options.step, best=options.best)
    for warning in checkpoint.contents.warnings:
        print(f"jaxformer: warning: {warning}", file=sys.stderr)
    plan = language_model(checkpoint)
    tokenizer = checkpoint.tokenizer(plan.module.config.vocab_size)
    return Run(build(in_float32(plan)), tokenizer)


def _text(run: Run, options: TextOptions) -> tuple[str, np.ndarray]:
    """The text asked for, or one that the model writes, and its ids."""
    context = run.config.context_length
    if options.text is None:
        start = run.tokenizer.encode("\n", unknown="replace")
        count = min(40, context)
        ids = generate(run.model, start[None], count, temperature=0.8, key=jax.random.key(0))[0]
        ids = ids[ids < run.tokenizer.vocabulary_size()]
        return run.tokenizer.decode(ids), ids
    ids = run.tokenizer.encode(options.text, unknown=options.unknown)
    if not 1 <= len(ids) <= context:
        raise UsageError(f"--text must have 1 to {context} characters to read: got {len(ids)}")
    return run.tokenizer.decode(ids), ids


def _choose(tables: dict[str, np.ndarray], dimensions: tuple[int, ...]) -> dict[str, list[int]]:
    """Of each table the columns, and of a bias the heads, that are drawn as curves."""
    counts = {name: t.shape[0 if t.ndim == 3 else 1] for name, t in tables.items()}
    for dimension in dimensions:
        if not 0 <= dimension < max(counts.values()):
            raise UsageError(
                f"--dimensions must be in [0, {max(counts.values())}): got {dimension}"
            )
    return {
        name: [d for d in dimensions if d < count]
        or [count * i // min(count, 5) for i in range(min(count, 5))]
        for name, count in counts.items()
    }


def _check_index(name: str, index: int | None, count: int) -> None:
    if index is not None and not 0 <= index < count:
        raise UsageError(f"--{name} must be in [0, {count}): got {index}")


def _plain(value: Any) -> Any:
    """The same in what JSON knows."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
