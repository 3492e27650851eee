"""The costs of a model: operations, counted; time and memory of a block, measured and fitted.

One pass of a block is forward and backward: its output, and the gradient of sum(output) by its
input and parameters. Its operations fall into two terms: attention, O(T² · D), and the products
with weight matrices, O(T · D · F) where F is in proportion to D.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_ref.blocks import Block
from torch_ref.builders import make_block
from torch_ref.config import TransformerConfig
from torch_ref.encoder_decoder import EncoderDecoder
from torch_ref.experts import MixtureOfExperts
from torch_ref.layers import Linear
from torch_ref.transformer_lm import TransformerLM

Costs = dict[str, np.ndarray]


def count_operations(block: Block, length: int) -> dict[str, int]:
    """Returns the operations in the matrix products of a block's forward pass, per sequence.

    ``attention`` is 4 · T² · N · H: scores, and weights times values, whatever the mask; values of
    latent attention may have another width. ``dense`` is 2 · T · the number of elements in the
    block's weight matrices: 4 · T · D · (N + K) · H for the projections and 4 · T · D · F for the
    feed-forward, 6 where it is gated. Of E experts those C count that a token has. A pass forward
    and backward takes three times as many.

    Args:
        block: what its cross-attention adds is in ``count_cross_operations``; relative positions'
            own products are not counted.
        length: T, in tokens.
    """
    matrices = (node.weight.numel() for node in block.modules() if isinstance(node, Linear))
    experts = (
        node.router.experts_per_token * linear.weight[0].numel()
        for node in block.modules()
        if isinstance(node, MixtureOfExperts)
        for linear in (node.gate_proj, node.up_proj, node.down_proj)
    )
    attention = block.attention
    value_dim = getattr(attention, "value_dim", attention.head_dim)
    return {
        "attention": 2 * length**2 * attention.num_heads * (attention.head_dim + value_dim),
        "dense": 2 * length * (sum(matrices) + sum(experts)),
    }


def count_cross_operations(block: Block, length: int, source_length: int) -> dict[str, int]:
    """Returns what a block's cross-attention adds to its ``count_operations``, per target.

    ``attention`` is 4 · T · S · N · H; ``dense`` is 2 · (S - T) · the number of elements in the
    matrices of keys and values, which are made of the source, and not of the target.

    Args:
        block: with cross-attention.
        length: T, in tokens of the target.
        source_length: S, in tokens of the source.
    """
    cross: Any = block.cross_attention
    made_of_source = cross.k_proj.weight.numel() + cross.v_proj.weight.numel()
    return {
        "attention": 4 * length * source_length * cross.num_heads * cross.head_dim,
        "dense": 2 * (source_length - length) * made_of_source,
    }


def count_training_operations(
    model: TransformerLM | EncoderDecoder, length: int, source_length: int = 0
) -> int:
    """Returns the operations in matrix products of a training step, per token.

    6 · W + 12 · L · T · N · H, the model FLOPs of PaLM (arXiv 2204.02311, appendix B): W is the
    number of elements in the weight matrices, a tied head's table included; a table that is only
    looked up multiplies nothing. Attention counts in full, whatever the mask; what is computed
    again to save memory counts once.

    Args:
        model: with a head; on the ``meta`` device is enough.
        length: T, in tokens; of an encoder and decoder those of a target.
        source_length: S, of its source; a token is then one of S + T.
    """
    if isinstance(model, EncoderDecoder):
        return _count_pair(model, length, source_length) // (length + source_length)
    blocks = [count_operations(block, length) for block in model.layers]
    forward = sum(block["attention"] + block["dense"] for block in blocks) // length
    heads = [model.head_transform and model.head_transform.proj, model.lm_head]
    head = sum(part.weight.numel() for part in heads if isinstance(part, Linear))
    if model.config.head.tie_embeddings:
        head += model.token_embedding.weight.numel()
    return 3 * (forward + 2 * head)


def _count_pair(model: EncoderDecoder, length: int, source_length: int) -> int:
    """The operations in matrix products of a step, for a source and its target."""
    encoder: list[Any] = list(model.encoder.blocks)
    decoder: list[Any] = list(model.decoder.blocks)
    counts = [count_operations(block, source_length) for block in encoder]
    counts += [count_operations(block, length) for block in decoder]
    counts += [count_cross_operations(block, length, source_length) for block in decoder]
    forward = sum(sum(count.values()) for count in counts)
    if model.config.head.tie_embeddings:
        forward += 2 * length * model.target_embedding.weight.numel()
    elif isinstance(model.lm_head, Linear):
        forward += 2 * length * model.lm_head.weight.numel()
    return 3 * forward


def measure_blocks(
    configs: Sequence[TransformerConfig],
    lengths: Sequence[int],
    *,
    batch_size: int = 1,
    rounds: int = 7,
) -> Costs:
    """Returns time and memory of one pass of a block, for every config and length.

    Time is the median over rounds that take every point in turn, so that a slow moment of the
    machine falls on all of them. Memory is that of the tensors which the forward pass saves for the
    backward pass, parameters and input apart; torch's fused attention saves no weights.

    Args:
        configs: of the blocks; no position embedding and no mask take part.
        lengths: T, in tokens.
        batch_size: B, texts at once.
        rounds: how many times each point is timed, after one run that is not.

    Returns:
        For every point, config by config: ``length``, ``d_model``, ``attention_operations`` and
        ``dense_operations`` (of the whole pass), ``attention_weights`` (B · N · T² elements),
        ``activations`` (B · T · (D + F) elements), ``seconds`` and ``bytes``.
    """
    points, runs = [], []
    for config in configs:
        block = make_block(config).eval()
        d_ff = block.feed_forward.up_proj.weight.shape[0]
        for length in lengths:
            operations = count_operations(block, length)
            run, memory = _prepare_pass(block, (batch_size, length, config.d_model))
            runs.append(run)
            points.append(
                {
                    "length": length,
                    "d_model": config.d_model,
                    "attention_operations": 3 * batch_size * operations["attention"],
                    "dense_operations": 3 * batch_size * operations["dense"],
                    "attention_weights": batch_size * config.attention.num_heads * length**2,
                    "activations": batch_size * length * (config.d_model + d_ff),
                    "bytes": memory,
                }
            )
    costs = {name: np.array([point[name] for point in points], float) for name in points[0]}
    return {**costs, "seconds": np.array(_time_in_turn(runs, rounds))}


def fit_costs(costs: Costs) -> dict[str, dict[str, float]]:
    """Returns the least-squares fit of time and memory to their two terms and a constant.

    seconds = constant + a · attention_operations + b · dense_operations, and bytes = constant +
    a · attention_weights + b · activations. Errors are relative, so that short texts count as much
    as long ones.

    Args:
        costs: as ``measure_blocks`` returns them.

    Returns:
        For ``seconds`` and ``bytes`` the coefficients by the names of their terms (seconds per
        operation, bytes per element), and ``error``, the median of |fitted / measured - 1|.

    Raises:
        ValueError: fewer than three points.
    """
    return {
        "seconds": _fit(costs, "seconds", ("attention_operations", "dense_operations")),
        "bytes": _fit(costs, "bytes", ("attention_weights", "activations")),
    }


def evaluate_fit(fit: dict[str, float], costs: Costs) -> np.ndarray:
    """Returns the time or memory that one entry of ``fit_costs`` gives for ``costs``."""
    terms = [fit[name] * costs[name] for name in fit if name not in ("constant", "error")]
    return fit["constant"] + np.sum(terms, axis=0)


def _fit(costs: Costs, measured: str, terms: tuple[str, ...]) -> dict[str, float]:
    y = costs[measured]
    if len(y) <= len(terms):
        raise ValueError(f"a fit needs {1 + len(terms)} points or more: got {len(y)}")
    columns = np.stack([np.ones_like(y), *(costs[name] for name in terms)], axis=1)
    # One size for all columns: seconds and operations lie ten powers of ten apart.
    size = columns.max(axis=0)
    coefficients = np.linalg.lstsq(columns / size / y[:, None], np.ones_like(y), rcond=None)[0]
    fit = dict(zip(("constant", *terms), map(float, coefficients / size), strict=True))
    return {**fit, "error": float(np.median(np.abs(evaluate_fit(fit, costs) / y - 1)))}


def _time_in_turn(runs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """The median seconds of each run."""
    for run in runs:
        run()
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, taken in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def _prepare_pass(block: Block, shape: tuple[int, int, int]) -> tuple[Callable[[], None], int]:
    """One pass, ready to be run to its end, and the bytes that its forward pass saves."""
    x_BTD = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    inputs = [x_BTD, *block.parameters()]

    def run() -> None:
        torch.autograd.grad(block(x_BTD).sum(), inputs)

    return run, _saved_bytes(block, x_BTD)


def _saved_bytes(block: nn.Module, x_BTD: torch.Tensor) -> int:
    """The bytes of all that the forward pass saves, each storage once."""
    own = {p.untyped_storage().data_ptr() for p in (x_BTD, *block.parameters())}
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = block(x_BTD)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    del output
    return sum(size for pointer, size in storages.items() if pointer not in own)
