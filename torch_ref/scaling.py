"""The effect of scaling scores by 1/sqrt(H) on a softmax (arXiv 1706.03762, section 3.2.1)."""

from collections.abc import Sequence

import numpy as np
import torch

from torch_ref.attention import scaled_dot_product_attention
from torch_ref.parameters import to_numpy


def softmax_scaling(
    head_sizes: Sequence[int] = (16, 64, 256, 1024),
    *,
    num_queries: int = 256,
    num_keys: int = 64,
    seed: int = 0,
) -> dict[str, dict[str, np.ndarray]]:
    """Returns statistics of a softmax with and without 1/sqrt(H), for normal queries and keys.

    The variance of q·k is H; unscaled, a large head's softmax saturates and passes on hardly any
    gradient (Vaswani et al., arXiv 1706.03762, section 3.2.1 and footnote 4).

    Args:
        head_sizes: H.
        num_queries: over how many queries the results are averaged.
        num_keys: S, from how many keys each chooses; an even choice has entropy ln(S).
        seed: of the numpy generator that draws queries and keys.

    Returns:
        For ``scaled`` and ``unscaled``, an entry per head size of ``score_variance``,
        ``max_weight`` (mean of the largest weight), ``entropy`` (mean, nats) and ``gradient`` (mean
        over queries of Σ |∂weight_i / ∂score_j|, which is 2·(1 - Σ weight²): 2·(1 - 1/S) for an
        even choice, 0 for a certain one; a root of squares would rise before it falls).
    """
    rows: dict[str, list[dict[str, float]]] = {"scaled": [], "unscaled": []}
    for head_size in head_sizes:
        random = np.random.default_rng((seed, head_size))
        q = torch.from_numpy(random.standard_normal((1, num_queries, 1, head_size)))
        k = torch.from_numpy(random.standard_normal((1, num_keys, 1, head_size)))
        rows["scaled"].append(_softmax_statistics(q, k, head_size**-0.5))
        rows["unscaled"].append(_softmax_statistics(q, k, 1.0))
    return {
        name: {key: np.array([one[key] for one in many]) for key in many[0]}
        for name, many in rows.items()
    }


def _softmax_statistics(
    q_BTNH: torch.Tensor, k_BSNH: torch.Tensor, scale: float
) -> dict[str, float]:
    results = _softmax_and_jacobian(q_BTNH, k_BSNH, scale)
    scores_TS, p_TS, jacobian_STS = (to_numpy(result) for result in results)
    return {
        "score_variance": float(scores_TS.var()),
        "max_weight": float(p_TS.max(axis=1).mean()),
        "entropy": float(-(p_TS * np.log(np.where(p_TS > 0, p_TS, 1))).sum(axis=1).mean()),
        "gradient": float(np.abs(jacobian_STS).sum(axis=(0, 2)).mean()),
    }


def _softmax_and_jacobian(
    q_BTNH: torch.Tensor, k_BSNH: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, weights (T, S), and the gradient of each weight by its query's scores (S, T, S)."""
    queries, keys = q_BTNH.shape[1], k_BSNH.shape[1]

    def weights_of(scores_TS: torch.Tensor) -> torch.Tensor:
        # What is added to the scores has the gradient of the scores.
        bias = scores_TS[None, None]
        return scaled_dot_product_attention(q_BTNH, k_BSNH, k_BSNH, bias=bias, scale=scale)[1][0, 0]

    zero_TS = torch.zeros(queries, keys, dtype=q_BTNH.dtype)
    p_TS, by_weight = torch.func.vjp(weights_of, zero_TS)  # type: ignore[misc]
    each_STS = torch.eye(keys, dtype=q_BTNH.dtype)[:, None].expand(keys, queries, keys)
    scores_TS = torch.einsum("btnh,bsnh->ts", q_BTNH, k_BSNH) * scale
    return scores_TS, p_TS, torch.func.vmap(by_weight)(each_STS)[0]
