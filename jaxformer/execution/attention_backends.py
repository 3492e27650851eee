"""The choice of the kernel: the plain core, block by block, cuDNN's, splash, or a custom call.

It is no part of a model's settings: the same checkpoint runs with each kernel.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxformer.errors import UsageError
from jaxformer.execution.scopes import check_known, set_within
from jaxformer.hardware import attention_call

if TYPE_CHECKING:
    from jaxformer.config import TransformerLMConfig

Kernel = Literal["plain", "blockwise", "cudnn", "splash", "called"]
KernelChoice = Literal["auto", "plain", "cudnn", "splash"]

# Positions that add something to the scores.
ADDED_TO_SCORES = ("alibi", "relative", "relative_buckets", "disentangled")

# On a CPU up to as many scores of a head the plain core computes them, and as fast. Beyond, its
# scores leave the caches: with 1,024 positions both passes take up to twice as long as block by
# block, with 4,096 five times.
MOST_PLAIN_SCORES = 512**2

# Splash attention works on blocks of queries and keys; the largest that divides the length.
SPLASH_BLOCKS = (512, 256, 128)

_choice: contextvars.ContextVar[KernelChoice] = contextvars.ContextVar(
    "attention_kernel", default="auto"
)
_target: contextvars.ContextVar["CompilationTarget | None"] = contextvars.ContextVar(
    "target", default=None
)


class KernelError(UsageError, ValueError):
    """The kernel that the user chose cannot compute what the model needs."""


@dataclass(frozen=True)
class MaskPattern:
    """A mask as a rule. Queries and keys stand at slots 0, 1, 2 ….

    Attributes:
        causal: whether a query is kept from later keys.
        window: how many tokens a query sees on each side, itself included; None is all.
    """

    causal: bool
    window: int | None = None

    @classmethod
    def read(
        cls, mask: Bool[Array, "B N T S"] | None, queries: int, keys: int
    ) -> "MaskPattern | None":
        """Returns the rule of a mask; None if it follows no rule or is unknown while tracing."""
        if mask is None:
            return cls(causal=False)
        if not isinstance(mask, np.ndarray) or mask.shape != (1, 1, queries, keys):
            return None
        seen_TS = mask[0, 0]
        causal = not seen_TS[0, 1:].any()
        # Of a window, the first key is seen by as many queries as it is wide.
        width = int(np.argmin(np.append(seen_TS[:, 0], False)))
        window = None if width == queries else width
        rule = cls(causal, window)
        return rule if window != 0 and np.array_equal(seen_TS, rule._array(queries, keys)) else None

    def _array(self, queries: int, keys: int) -> np.ndarray:
        query_T1, key_1S = np.arange(queries)[:, None], np.arange(keys)[None, :]
        seen_TS = key_1S <= query_T1 if self.causal else np.ones((queries, keys), bool)
        if self.window is not None:
            seen_TS &= (key_1S < query_T1 + self.window) & (key_1S > query_T1 - self.window)
        return seen_TS


@dataclass(frozen=True)
class CompilationTarget:
    """The kind of device that a program is compiled for.

    Attributes:
        platform: cpu, cuda, rocm or tpu.
        capability: CUDA's compute capability, (9, 0) for an H100.
    """

    platform: str
    capability: tuple[int, int] = (0, 0)

    @classmethod
    def here(cls) -> "CompilationTarget":
        """Returns the target of ``compiled_for``, else that of the default backend."""
        return _target.get() or cls.of(jax.devices()[0])

    @classmethod
    def of(cls, device: jax.Device) -> "CompilationTarget":
        """Returns the target of a device, which need not be present."""
        if device.platform != "gpu":
            return cls(device.platform)
        if "rocm" in device.client.platform_version:
            return cls("rocm")
        major, minor = device.compute_capability.split(".")
        return cls("cuda", (int(major), int(minor)))


@dataclass(frozen=True)
class AttentionCall:
    """The properties of one call of attention that decide which kernels can compute it.

    Attributes:
        dtype: of queries, keys and values.
        head_dim: H.
        queries: T.
        keys: S.
        pattern: the mask as a rule; None if it is only known as an array.
        bias: whether something is added to the scores.
        soft_cap: whether scores are bounded.
        dropout: whether weights are dropped.
        weights: whether the weights are returned.
        called: whether a custom call takes its arrays, see ``called_attention``.
        precision: ``jax.config.jax_default_matmul_precision``.
    """

    dtype: Any
    head_dim: int
    queries: int
    keys: int
    pattern: MaskPattern | None
    bias: bool = False
    soft_cap: bool = False
    dropout: bool = False
    weights: bool = False
    called: bool = False
    precision: str | None = None


@contextlib.contextmanager
def attention_kernel(choice: KernelChoice) -> Iterator[None]:
    """Makes models be traced with this choice of kernel; outside the context it is ``auto``.

    A function that ``jax.jit`` has compiled keeps the kernel that it was traced with.

    Raises:
        ValueError: the choice is unknown.
    """
    check_known("attention_kernel", choice, get_args(KernelChoice))
    with set_within(_choice, choice):
        yield


def compiled_for(target: CompilationTarget) -> AbstractContextManager[None]:
    """Makes models be traced for this target in place of the default backend."""
    return set_within(_target, target)


def choose_kernel(
    call: AttentionCall, target: CompilationTarget | None = None, choice: KernelChoice | None = None
) -> Kernel:
    """Returns the kernel for a call: the chosen one, or with ``auto`` the fastest that can.

    Args:
        call: its properties.
        target: the device; by default that of ``compiled_for``, else the default backend.
        choice: by default that of ``attention_kernel``.

    Raises:
        KernelError: the chosen kernel cannot compute the call; the message says why.
    """
    choice = _choice.get() if choice is None else choice
    if choice == "plain":
        return "plain"
    target = CompilationTarget.here() if target is None else target
    if choice == "auto":
        fused: tuple[Kernel, ...] = ("cudnn", "splash", "called", "blockwise")
        return next(
            (kernel for kernel in fused if unsupported_reason(kernel, call, target) is None),
            "plain",
        )
    reason = unsupported_reason(choice, call, target)
    if reason is not None:
        raise KernelError(f"attention_kernel={choice!r} {reason}; 'auto' takes what can")
    return choice


def unsupported_reason(
    kernel: Kernel, call: AttentionCall, target: CompilationTarget
) -> str | None:
    """Returns why a kernel cannot compute a call; None if it can."""
    if kernel == "plain":
        return None
    if kernel == "blockwise":
        checks = _blockwise_checks(call, target)
        return next((reason for reason, applies in checks.items() if applies), None)
    checks = {
        "cudnn": _cudnn_checks,
        "splash": _splash_checks,
        "called": _call_checks,
    }[kernel](call, target)
    checks |= {
        "has no bias": call.bias,
        "drops no weights": call.dropout,
        "returns no weights": call.weights,
        "takes a causal mask or a window, not any mask": call.pattern is None,
        # A query past the last key's window sees none: the core and the call give zeros, the others
        # do as they do.
        "needs a key for each query of a window": kernel != "called"
        and call.queries > call.keys
        and call.pattern is not None
        and call.pattern.window is not None,
    }
    return next((reason for reason, applies in checks.items() if applies), None)


def slowed_by_dropout(config: "TransformerLMConfig", dtype: str) -> str | None:
    """Returns why a run should have no dropout on attention weights, if that is so.

    It is so where a fused kernel could compute the attention but for the dropout.

    Args:
        config: the model's settings.
        dtype: the dtype that it computes in.

    Returns:
        The reason; None if a kernel was chosen, or no fused kernel would be used anyway.
    """
    if not config.attention.attention_dropout or _choice.get() != "auto":
        return None
    call = AttentionCall(
        dtype,
        head_dim=config.head_width,
        queries=config.context_length,
        keys=config.context_length,
        pattern=MaskPattern(config.causal, config.attention.sliding_window),
        bias=config.position.positions in ADDED_TO_SCORES,
        soft_cap=config.attention.score_soft_cap is not None,
        precision=jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
    )
    kernel = choose_kernel(call)
    if kernel in ("plain", "blockwise"):
        return None
    return (
        f"attention_dropout={config.attention.attention_dropout} keeps attention out of the fused "
        f"kernel ({kernel}), which drops no weights; without it a step takes far less memory and "
        "time"
    )


def _blockwise_checks(call: AttentionCall, target: CompilationTarget) -> dict[str, bool]:
    """Reasons against the core block by block (``blockwise_attention``), if they apply."""
    return {
        "is for a CPU": target.platform != "cpu",
        f"is for more than {MOST_PLAIN_SCORES:,} scores of a head": call.queries * call.keys
        <= MOST_PLAIN_SCORES,
        "has no bias": call.bias,
        "returns no weights": call.weights,
    }


def _cudnn_checks(call: AttentionCall, target: CompilationTarget) -> dict[str, bool]:
    """Reasons against cuDNN's flash attention (``jax.nn.dot_product_attention``), if they apply."""
    widest = 256 if target.capability >= (9, 0) else 128
    pattern = call.pattern or MaskPattern(causal=False)
    return {
        "needs an NVIDIA GPU of compute capability 8.0 or more": target.platform != "cuda"
        or target.capability < (8, 0),
        "computes in bfloat16 or float16": jnp.dtype(call.dtype) not in (jnp.bfloat16, jnp.float16),
        f"needs a head_dim in steps of 8 up to {widest}": call.head_dim % 8 != 0
        or call.head_dim > widest,
        "has no soft cap": call.soft_cap,
        "needs as many queries as keys where the mask is causal": pattern.causal
        and call.queries != call.keys,
        "has a window only where the mask is causal": pattern.window is not None
        and not pattern.causal,
    }


def _splash_checks(call: AttentionCall, target: CompilationTarget) -> dict[str, bool]:
    """Reasons against splash attention (``jax.experimental.pallas.ops.tpu``), if they apply."""
    block = SPLASH_BLOCKS[-1]
    return {
        "needs a TPU": target.platform != "tpu",
        "computes in bfloat16": jnp.dtype(call.dtype) != jnp.bfloat16,
        # At any other the kernel does not compile.
        "computes at the default matmul precision": call.precision not in (None, "default"),
        f"needs queries and keys in steps of {block}": call.queries % block != 0
        or call.keys % block != 0,
    }


def _call_checks(call: AttentionCall, target: CompilationTarget) -> dict[str, bool]:
    """Reasons against a custom call (``called_attention``), if they apply."""
    return {
        "is for a CPU": target.platform != "cpu",
        "is for float32, without gradients or beside products that are called": not call.called,
        "has no soft cap": call.soft_cap,
        "needs a C compiler": call.called and not attention_call.is_known(),
    }
