"""The numbers of each inspection of a trained model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer import analysis, costs
from jaxformer.builders import make_block
from jaxformer.errors import Setting, UsageError
from jaxformer.execution.seeds import seed_key
from jaxformer.hardware.memory import host_memory
from jaxformer.inspection.attention_maps import attention
from jaxformer.inspection.expert_load import experts
from jaxformer.inspection.inspected_model import InspectedModel, Numbers, Unknown, text_and_ids
from jaxformer.positions import ALiBi, Rotary, SinusoidalPositions
from jaxformer.scaling import softmax_scaling
from jaxformer.training.memory import count_matrices


def gradients(
    run: InspectedModel, *, text: str | None = None, unknown: Unknown = "error"
) -> Numbers:
    """Returns ``analysis.gradient_norms`` of the logits of a text; see ``attention``."""
    text, ids = text_and_ids(run, text, unknown)
    return {"text": text, "norms": analysis.gradient_norms(run.model, jnp.asarray(ids)[None])}


def init(run: InspectedModel, *, seed: int = 0) -> Numbers:
    """Returns statistics and a histogram of the untrained model's output, for each initialization.

    The input is random tokens, (4, T).
    """
    vocab_size = run.config.vocab_size or run.tokenizer.vocabulary_size()
    shape = (4, run.config.context_length)
    ids = jnp.asarray(np.random.default_rng(seed).integers(0, vocab_size, shape, np.int32))
    results: Numbers = {}
    call = nnx.jit(lambda model: model(ids))
    for scheme in analysis.INITIALIZATIONS:
        with analysis.reinitialized(run.model, scheme, seed):
            output = np.asarray(call(run.model))
        density, edges = np.histogram(output, bins=60, density=True)
        statistics = analysis.output_statistics(output)
        results[scheme] = {**statistics, "density": density, "edges": edges}
    return results


def norms(run: InspectedModel, *, seed: int = 0, layers: int = 12) -> Numbers:
    """Returns ``analysis.norm_order_comparison`` of untrained blocks on standard normals."""
    blocks = [make_block(run.config, rngs=nnx.Rngs(seed_key(seed + i))) for i in range(layers)]
    for block in blocks:
        block.eval()
    length = min(run.config.context_length, 64)
    x = jax.random.normal(seed_key(seed), (4, length, run.config.d_model))
    return analysis.norm_order_comparison(blocks, x)


def positions(
    run: InspectedModel, *, length: int | None = None, dimensions: Sequence[int] = ()
) -> Numbers:
    """Returns ``analysis.position_tables``: the model's own, and every fixed scheme in its sizes.

    Args:
        run: the model.
        length: how many positions; default the model's context.
        dimensions: those to draw as curves; default five of each table.

    Raises:
        UsageError: the model has no such position or dimension.
    """
    config, model = run.config, run.model
    length = length or config.context_length
    head_dim = config.head_width
    own = (model.position_embedding, model.blocks[0].attention.position)
    fixed: list[Any] = [ALiBi(config.attention.num_heads)]
    if head_dim % 2 == 0:
        fixed.insert(0, Rotary(head_dim, length, base=config.position.rotary.rotary_base))
    if config.d_model % 2 == 0:
        fixed.insert(0, SinusoidalPositions(length, config.d_model))
    try:
        tables = analysis.position_tables(*own, length=length)
    except ValueError as error:
        raise UsageError(Setting("length", value=str(length)), f" is too long: {error}") from None
    # The model's own tables come first, and replace fixed ones of the same name.
    tables = {**tables, **analysis.position_tables(*fixed, length=length), **tables}
    return {"tables": tables, "dimensions": _choose(tables, dimensions)}


def masks(
    run: InspectedModel, *, length: int = 24, window: int | None = None, padded: int | None = None
) -> Numbers:
    """Returns ``analysis.mask_tables`` of one row of tokens, each (T, T).

    Args:
        run: the model.
        length: T.
        window: how many tokens a query sees on a side; default the model's, or a third of T.
        padded: how many tokens at the end are padding; default a quarter of T.
    """
    window = window or run.config.attention.sliding_window or -(-length // 3)
    padded = length // 4 if padded is None else padded
    tables = analysis.mask_tables(length, window=window, lengths=[length - padded])
    return {name: table[0] for name, table in tables.items()}


def scaling(
    run: InspectedModel, *, head_sizes: Sequence[int], keys: int | None = None, seed: int = 0
) -> Numbers:
    """Returns ``scaling.softmax_scaling`` for some head sizes and the model's own.

    Args:
        run: the model.
        head_sizes: which.
        keys: how many keys each query has; default the model's context, at most 256.
        seed: of queries and keys.
    """
    own = run.config.head_width
    sizes = sorted({*head_sizes, own})
    keys = keys or max(2, min(run.config.context_length, 256))
    results = softmax_scaling(sizes, num_keys=keys, seed=seed)
    return {"head_sizes": sizes, "keys": keys, **results}


def measure_costs(
    run: InspectedModel, *, lengths: Sequence[int], widths: Sequence[int], rounds: int = 7
) -> Numbers:
    """Returns ``costs.measure_blocks`` of the model's block, and ``costs.fit_costs`` of that.

    Args:
        run: the model.
        lengths: in tokens.
        widths: multiples of the model's width; heads and feed-forward grow with it.
        rounds: how often each is timed.

    Raises:
        UsageError: the widest block needs more memory than there is.
    """
    config = run.config
    configs = [
        config.replace(
            d_model=config.d_model * times,
            num_heads=config.attention.num_heads * times,
            num_kv_heads=config.key_value_heads * times,
            d_ff=config.feed_forward_width * times,
            context_length=max(lengths),
        )
        for times in sorted(set(widths))
    ]
    widest = configs[-1].replace(
        num_layers=1,
        vocab_size=None,
        full_attention_layers=(),
        layer_groups=None,
        layers_in_group=1,
    )
    weights = 4 * count_matrices(widest)
    # The gradient is as large.
    if 2 * weights > host_memory():
        raise UsageError(
            Setting("widths", value=str(max(widths))),
            f": the weights of the block and their gradient are "
            f"{2 * weights / 2**30:,.0f} GiB, more than there is; give smaller ones",
        )
    measured = costs.measure_blocks(configs, sorted(set(lengths)), rounds=rounds)
    return {"measured": measured, "fit": costs.fit_costs(measured)}


INSPECTIONS: dict[str, Callable[..., Numbers]] = {
    "attention": attention,
    "experts": experts,
    "gradients": gradients,
    "init": init,
    "norms": norms,
    "positions": positions,
    "masks": masks,
    "scaling": scaling,
    "costs": measure_costs,
}


def _choose(tables: Mapping[str, np.ndarray], dimensions: Sequence[int]) -> dict[str, list[int]]:
    """Returns the columns of each table, and the heads of a bias, that are drawn as curves."""
    counts = {name: t.shape[0 if t.ndim == 3 else 1] for name, t in tables.items()}
    for dimension in dimensions:
        if not 0 <= dimension < max(counts.values()):
            raise UsageError(
                Setting("dimensions"),
                f" must be in [0, {max(counts.values())}): got {dimension}",
            )
    return {
        name: [d for d in dimensions if d < count]
        or [count * i // min(count, 5) for i in range(min(count, 5))]
        for name, count in counts.items()
    }
