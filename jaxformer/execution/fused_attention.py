"""Attention by another kernel than the core: cuDNN's, splash, a custom call, or block by block.

The mathematics is that of ``attention_core.scaled_dot_product_attention``. A fused kernel keeps no
(T, S) array in memory. cuDNN's and splash attention round the weights to the dtype of their inputs,
so they are used only for bfloat16 and float16.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxformer.execution import called_attention
from jaxformer.execution.attention_backends import (
    SPLASH_BLOCKS,
    AttentionCall,
    Kernel,
    MaskPattern,
    choose_kernel,
)
from jaxformer.execution.blockwise_attention import blockwise_attention

if TYPE_CHECKING:
    from jaxformer.layers import Dropout


def try_fused_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    *,
    mask: Bool[Array, "B N T S"] | None,
    bias: Float[Array, "B N T S"] | None,
    scale: float,
    soft_cap: float | None,
    dropout: "Dropout",
    weights: bool,
) -> Float[Array, "B T N H"] | None:
    """Returns the output of a fused kernel, or None if the plain core must compute it.

    Args:
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values.
        mask: see ``scaled_dot_product_attention``; one that is known while tracing is a numpy
            array.
        bias: likewise.
        scale: what scores are multiplied by.
        soft_cap: see ``scaled_dot_product_attention``.
        dropout: applied to the weights.
        weights: whether the weights are to be returned, or what was dropped of them.

    Raises:
        KernelError: the kernel of ``attention_kernel`` cannot compute this call.
    """
    queries, keys = q_BTNH.shape[1], k_BSKH.shape[1]
    pattern = MaskPattern.read(mask, queries, keys)
    call = AttentionCall(
        q_BTNH.dtype,
        head_dim=q_BTNH.shape[-1],
        queries=queries,
        keys=keys,
        pattern=pattern,
        bias=bias is not None,
        soft_cap=soft_cap is not None,
        dropout=dropout.active,
        weights=weights,
        called=called_attention.fits(q_BTNH, k_BSKH, v_BSKH),
        precision=jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
    )
    kernel = choose_kernel(call)
    if kernel == "blockwise":
        return blockwise_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            mask=mask,
            pattern=pattern,
            scale=scale,
            soft_cap=soft_cap,
            dropout=dropout,
        )
    if kernel == "plain" or pattern is None:
        return None
    if kernel == "called":
        return called_attention.attention(
            q_BTNH, k_BSKH, v_BSKH, scale=scale, causal=pattern.causal, window=pattern.window
        )
    return fused_attention(
        kernel, q_BTNH, k_BSKH, v_BSKH, pattern=pattern, scale=scale, soft_cap=soft_cap
    )


def fused_attention(
    kernel: Kernel,
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    *,
    pattern: MaskPattern,
    scale: float,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Computes ``scaled_dot_product_attention`` by a fused kernel, without the weights.

    Args:
        kernel: ``cudnn`` or ``splash``, as ``choose_kernel`` says.
        q_BTNH: queries.
        k_BSKH: keys; query head n uses key/value head n // (N / K).
        v_BSKH: values.
        pattern: the mask as a rule.
        scale: what scores are multiplied by.
        soft_cap: see ``scaled_dot_product_attention``.
        interpret: run splash attention on any platform, slowly, to check its numbers.

    Raises:
        ValueError: the kernel is not fused.
    """
    if kernel == "cudnn":
        window = pattern.window
        sides = None if window is None else (window - 1, 0 if pattern.causal else window - 1)
        return jax.nn.dot_product_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            scale=scale,
            is_causal=pattern.causal,
            local_window_size=sides,
            implementation="cudnn",
        )
    if kernel != "splash":
        raise ValueError(f"a fused kernel is cudnn or splash: got {kernel!r}")
    (queries, num_heads), keys = q_BTNH.shape[1:3], k_BSKH.shape[1]
    attend = _make_splash(pattern, num_heads, queries, keys, soft_cap, interpret)
    # The kernel scales nothing itself. The product is rounded to the dtype of its inputs.
    scaled_BTNH = (q_BTNH * scale).astype(q_BTNH.dtype)
    q_BNTH, k_BKSH, v_BKSH = (jnp.swapaxes(x, 1, 2) for x in (scaled_BTNH, k_BSKH, v_BSKH))
    return jnp.swapaxes(jax.vmap(attend)(q_BNTH, k_BKSH, v_BKSH), 1, 2)


def _make_splash(
    pattern: MaskPattern,
    num_heads: int,
    queries: int,
    keys: int,
    soft_cap: float | None,
    interpret: bool,
) -> Any:
    """Splash attention of one sequence, with q (N, T, H) and k, v (K, S, H)."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    side = None if pattern.window is None else pattern.window - 1
    one: masks.Mask = masks.FullMask((queries, keys))
    if pattern.causal or side is not None:
        one = masks.LocalMask((queries, keys), (side, 0 if pattern.causal else side), offset=0)
    block_q, block_kv = (
        next(block for block in SPLASH_BLOCKS if length % block == 0) for length in (queries, keys)
    )
    return splash.make_splash_mha_single_device(
        masks.MultiHeadMask([one] * num_heads),
        block_sizes=splash.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )
