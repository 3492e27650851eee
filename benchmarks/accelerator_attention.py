"""cuDNN's attention beside the plain core and torch's; a part of ``accelerator_checks.py``."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import measure
import numpy as np
from accelerator_losses import Arrays, Row

PATTERNS = {"causal": (True, None), "causal, window": (True, 100), "not causal": (False, None)}


def check_attention(turns: int, _: Any) -> Iterator[Row]:
    """Compares cuDNN's attention with the plain core and with torch's, forward and backward.

    Fused kernels round the weights and their gradients, which the plain core does not. torch's
    flash attention has no window: there its memory-efficient kernel, with a mask, takes its place.
    """
    import jax
    import jax.numpy as jnp

    from jaxformer.attention_core import scaled_dot_product_attention
    from jaxformer.execution.attention_backends import MaskPattern
    from jaxformer.execution.fused_attention import fused_attention
    from parity_tests.verdict import measure_rounding

    if not measure.on_gpu():
        yield {"name": "cuDNN's kernel", "holds": None, "skipped": "needs an NVIDIA GPU"}
        return
    batch, length, heads, kv_heads, width = 2, 512, 8, 2, 64
    cpu, scale = jax.devices("cpu")[0], width**-0.5

    def both_passes(attend: Callable[..., Any]) -> Callable[..., Arrays]:
        def loss(inputs: Any, cotangent: Any) -> Any:
            out = attend(*inputs)
            wide = jnp.promote_types(out.dtype, jnp.float32)
            return jnp.sum(out.astype(wide) * cotangent.astype(wide)), out

        compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))

        def run(*given: np.ndarray) -> Arrays:
            *inputs, cotangent = map(jnp.asarray, given)
            (_, out), gradients = compiled(tuple(inputs), cotangent)
            return named(out, *gradients)

        return run

    for name, (causal, window) in PATTERNS.items():
        pattern = MaskPattern(causal, window)
        seen = np.ones((length, length), bool)
        if causal:
            seen = np.tril(seen)
        if window is not None:
            seen &= ~np.tril(seen, -window)
        mask = None if seen.all() else seen[None, None]
        for_torch = None if window is None else seen
        plain = both_passes(
            lambda q, k, v, mask=mask: scaled_dot_product_attention(q, k, v, mask=mask)[0]
        )
        fused = both_passes(
            functools.partial(fused_attention, "cudnn", pattern=pattern, scale=scale)
        )
        for dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
            by_plain, by_torch, failed = [], [], None
            for draw in range(turns):
                random = np.random.default_rng(draw)
                counts = (heads, kv_heads, kv_heads, heads)
                given = [
                    random.standard_normal((batch, length, n, width)).astype(dtype) for n in counts
                ]
                with jax.enable_x64(True), jax.default_device(cpu):
                    exact = plain(*(x.astype(np.float64) for x in given))
                found = fused(*given)
                by_plain.append((found, plain(*given), exact))
                try:
                    reference_arrays = torch_attention(given, causal, for_torch)
                    by_torch.append((found, reference_arrays, exact))
                except RuntimeError as error:
                    failed = str(error).splitlines()[0]
            row: Row = {"name": f"{name}, {dtype.name}", "torch_failed": failed}
            for reference, draws in (("plain", by_plain), ("torch", by_torch)):
                for kind, judged in (measure_rounding(draws, dtype) if draws else {}).items():
                    row.setdefault(kind, {"error": measure.rounded(judged.candidate)})
                    row[kind] |= {
                        f"{reference}_error": measure.rounded(judged.reference),
                        f"ratio_to_{reference}": measure.rounded(judged.ratio),
                    }
            row["holds"] = all(row[kind]["ratio_to_plain"] <= 2 for kind in ("output", "input"))
            yield row


def named(out: Any, *gradients: Any) -> Arrays:
    """Returns an output and gradients of inputs by name, float64."""
    arrays = {"output": out, **{f"input.{i}": g for i, g in zip("qkv", gradients, strict=True)}}
    return {name: np.asarray(a).astype(np.float64) for name, a in arrays.items()}


def torch_attention(given: Sequence[np.ndarray], causal: bool, seen: np.ndarray | None) -> Arrays:
    """Returns what a fused kernel of torch gives for queries, keys, values and a cotangent.

    Args:
        given: these four, (B, T, N, H).
        causal: whether a query is kept from later keys.
        seen: (T, T), where a rule is not enough: the memory-efficient kernel then computes it.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = getattr(torch, given[0].dtype.name)
    q, k, v, cotangent = (
        torch.from_numpy(x.astype(np.float32)).to("cuda", dtype).transpose(1, 2) for x in given
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    backend, rule = SDPBackend.FLASH_ATTENTION, {"is_causal": causal, "enable_gqa": True}
    if seen is not None:
        backend, rule = SDPBackend.EFFICIENT_ATTENTION, {"attn_mask": torch.tensor(seen).cuda()}
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **rule)
    gradients = torch.autograd.grad((out.float() * cotangent.float()).sum(), leaves)
    return named(*(x.detach().transpose(1, 2).double().cpu() for x in (out, *gradients)))
