"""Mutants for the parity debugger: functions that inject a bug into a model.

A mutant changes one module of one side and says which modules a report must name. It does not use
the debugger.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block, ParallelBlock, PostNormBlock, PreNormBlock
from jaxformer.feed_forward import FeedForward, GatedFeedForward
from jaxformer.layers import Embedding, Linear
from jaxformer.norms import LayerNorm, RMSNorm
from jaxformer.parameters import join_path
from jaxformer.positions import LearnedPositions, Rotary
from jaxformer.transformer_lm import TransformerLM
from tests.support.subjects import Mutated, Subject

Random = np.random.Generator
# Injects a bug into the candidate, or returns None if it does not apply to the model.
Mutant = Callable[[Subject, Any, Random], Mutated | None]


def nodes(module: Any, *kinds: type) -> dict[str, Any]:
    """Returns the modules of these classes by path."""
    return {
        join_path(path): node for path, node in nnx.iter_modules(module) if isinstance(node, kinds)
    }


def choose(found: Any, random: Random) -> Any:
    """Returns a random element of a list, or a random item of a dict."""
    found = sorted(found.items()) if isinstance(found, dict) else list(found)
    return found[random.integers(len(found))]


def replace_methods(node: Any, **methods: Callable[..., Any]) -> None:
    """Overrides methods of one module; each override gets the original method first."""
    cls = type(node)

    def bind(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(cls, name)

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(functools.partial(original, self), self, *args, **kwargs)

        return call

    mutated = {name: bind(name, method) for name, method in methods.items()}
    node.__class__ = type(f"Mutated{cls.__name__}", (cls,), mutated)


def eps(subject: Subject, candidate: Any, random: Random) -> Mutated:
    path, norm = choose(nodes(candidate, LayerNorm, RMSNorm), random)
    norm.eps = choose([e for e in (1e-3, 1e-4, 1e-6, 1e-8) if e != norm.eps], random)
    return subject.mutated(path, "forward", f"eps {norm.eps}")


def activation(subject: Subject, candidate: Any, random: Random) -> Mutated:
    path, node = choose(nodes(candidate, FeedForward, GatedFeedForward), random)
    twin = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}.get(node.activation)
    others = [twin] * 3 if twin else []
    others += [a for a in ("relu", "gelu", "gelu_tanh", "silu") if a != node.activation]
    node.activation = choose(others, random)
    return subject.mutated(path, "forward", f"activation {node.activation}")


def transposed(subject: Subject, candidate: Any, random: Random) -> Mutated:
    linears = nodes(candidate, Linear)
    square = {p: m for p, m in linears.items() if len(set(m.kernel.shape)) == 1}
    path, node = choose(square, random)
    node.kernel.set_value(node.kernel[...].T)
    return subject.mutated(path, "parameters", "transposed")


def permuted(subject: Subject, candidate: Any, random: Random) -> Mutated:
    path, node = choose(nodes(candidate, Linear, Embedding), random)
    weight = node.kernel if isinstance(node, Linear) else node.embedding
    axis = int(random.integers(2))
    order = random.permutation(weight.shape[axis])
    weight.set_value(jnp.take(weight[...], order, axis=axis))
    return subject.mutated(path, "parameters", f"permuted along axis {axis}")


def head_order(subject: Subject, candidate: Any, random: Random) -> Mutated:
    path, node = choose(nodes(candidate, MultiHeadAttention), random)
    name = choose(["q_proj", "o_proj"], random)
    kernel = getattr(node, name).kernel
    heads = kernel[...].T if name == "q_proj" else kernel[...]
    heads = jnp.roll(heads.reshape(node.num_heads, -1, heads.shape[-1]), 1, axis=0)
    heads = heads.reshape(-1, heads.shape[-1])
    kernel.set_value(heads.T if name == "q_proj" else heads)
    return subject.mutated(f"{path}.{name}".lstrip("."), "parameters", "heads in another order")


def zeroed_bias(subject: Subject, candidate: Any, random: Random) -> Mutated | None:
    found = {p: m for p, m in nodes(candidate, Linear, LayerNorm).items() if m.bias is not None}
    if not found:
        return None
    path, node = choose(found, random)
    node.bias.set_value(jnp.zeros_like(node.bias[...]))
    return subject.mutated(path, "parameters", "bias is zero")


def one_element(subject: Subject, candidate: Any, random: Random) -> Mutated:
    found = nodes(candidate, Linear, Embedding, LayerNorm, RMSNorm, LearnedPositions)
    path, node = choose(found, random)
    leaves = [getattr(node, name, None) for name in ("kernel", "bias", "scale", "embedding")]
    variable = [leaf for leaf in leaves if leaf is not None][
        random.integers(sum(x is not None for x in leaves))
    ]
    place = tuple(int(random.integers(size)) for size in variable.shape)
    variable.set_value(variable[...].at[place].add(1e-3))
    return subject.mutated(path, "parameters", f"element {place}")


def swapped(subject: Subject, candidate: Any, random: Random) -> Mutated | None:
    stacks = {p: m for p, m in nodes(candidate, nnx.List).items() if p.endswith("blocks")}
    if not stacks:
        return None
    path, blocks = choose(stacks, random)
    one, other = sorted(random.choice(len(blocks), 2, replace=False).tolist())
    blocks[one], blocks[other] = blocks[other], blocks[one]
    where = {
        subject.name_in_report(f"{path}.{n}.{inner}")
        for n in (one, other)
        for inner, node in nodes(blocks[n], Linear, LayerNorm, RMSNorm).items()
    }
    remark = f"layers {one} and {other} of {path} look swapped"
    return Mutated(frozenset(where), "parameters", remark, remark)


def mask_shift(subject: Subject, candidate: Any, random: Random) -> Mutated | None:
    if not subject.masked:
        return None
    path, node = choose(
        {p: m for p, m in nodes(candidate, MultiHeadAttention).items() if "cross" not in p}, random
    )

    def call(original: Any, self: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
        args, mask = (args[:-1], args[-1]) if mask is None else (args, mask)
        return original(*args, mask=jnp.roll(mask, 1, axis=-1), **kwargs)

    replace_methods(node, __call__=call)
    return subject.mutated(path, "forward", "mask shifted by one")


def model_mask(subject: Subject, candidate: Any, random: Random) -> Mutated | None:
    """Changes the masks that the model makes: no causal mask, or a window off by one."""
    if not isinstance(candidate, TransformerLM) or not candidate.config.causal:
        return None
    window = candidate.config.attention.sliding_window
    change = {"causal": False}
    if window is not None:
        change = choose([change, *[{"sliding_window": window + n} for n in (-1, 1)] * 2], random)
    candidate.config = dataclasses.replace(candidate.config, **change)
    return subject.mutated("", "forward", f"config {change}")


def rotary_layout(subject: Subject, candidate: Any, random: Random) -> Mutated | None:
    found = nodes(candidate, Rotary)
    if not found:
        return None
    path, node = choose(found, random)
    node.interleaved = not node.interleaved
    return subject.mutated(path.rpartition(".")[0], "forward", "rotary layout")


def rotary_base(subject: Subject, candidate: Any, random: Random) -> Mutated | None:
    found = nodes(candidate, Rotary)
    if not found:
        return None
    path, node = choose(found, random)
    node.base *= choose([1.01, 50.0], random)
    # Tables that came with the checkpoint would be used instead of the base.
    node.cos = node.sin = None
    where = path if subject.has_rotary_module else path.rpartition(".")[0]
    return subject.mutated(where, "forward", "rotary base")


def attention_scale(subject: Subject, candidate: Any, random: Random) -> Mutated:
    path, node = choose(nodes(candidate, MultiHeadAttention), random)
    node.scale *= choose([0.99, 0.5, float(np.sqrt(node.head_dim))], random)
    return subject.mutated(path, "forward", "attention scale")


def soft_cap(subject: Subject, candidate: Any, random: Random) -> Mutated | None:
    found = {p: m for p, m in nodes(candidate, MultiHeadAttention).items() if m.score_soft_cap}
    if not found:
        return None
    if random.integers(2):
        candidate.config = dataclasses.replace(candidate.config, logit_soft_cap=None)
        return subject.mutated("", "forward", "no cap of logits")
    path, node = choose(found, random)
    node.score_soft_cap = None
    return subject.mutated(path, "forward", "no cap of scores")


def embedding_scale(subject: Subject, candidate: Any, random: Random) -> Mutated | None:
    config = getattr(candidate, "config", None)
    if config is None or config.embedding.embedding_scale is None:
        return None
    candidate.config = dataclasses.replace(candidate.config, embedding_scale=None)
    return subject.mutated("", "forward", "no embedding scale")


def positions_shift(subject: Subject, candidate: Any, random: Random) -> Mutated | None:
    found = nodes(candidate, LearnedPositions)
    if not found:
        return None
    path, node = choose(found, random)

    def call(original: Any, self: Any, length: int, positions: Any = None) -> Any:
        return original(length, jnp.arange(1, length + 1)[None])

    replace_methods(node, __call__=call)
    return subject.mutated(path, "forward", "positions start at one")


def no_residual(subject: Subject, candidate: Any, random: Random) -> Mutated:
    path, node = choose(nodes(candidate, Block), random)
    which = int(random.integers(2))

    def combine(original: Any, self: Any, x: Any, branches: Any) -> Any:
        norm, branch, drop = branches[which]
        wrong = (norm, branch, lambda h: drop(h) - x)
        return original(x, [*branches[:which], wrong, *branches[which + 1 :]])

    replace_methods(node, combine=combine)
    return subject.mutated(path, "forward", "a residual sum is off")


def norm_order(subject: Subject, candidate: Any, random: Random) -> Mutated:
    path, node = choose(nodes(candidate, Block), random)
    kind = PostNormBlock if isinstance(node, PreNormBlock | ParallelBlock) else PreNormBlock

    def combine(original: Any, self: Any, x: Any, branches: Any) -> Any:
        return kind.combine(self, x, branches)

    replace_methods(node, combine=combine)
    return subject.mutated(path, "forward", f"the order of a {kind.__name__}")


def no_norm(subject: Subject, candidate: Any, random: Random) -> Mutated:
    path, node = choose(nodes(candidate, Block), random)

    def combine(original: Any, self: Any, x: Any, branches: Any) -> Any:
        return original(x, [(lambda h: h, *branches[0][1:]), *branches[1:]])

    replace_methods(node, combine=combine)
    return subject.mutated(path, "forward", "a norm is not called")


def computing(candidate: Any) -> dict[str, Any]:
    kinds = (Linear, LayerNorm, RMSNorm, FeedForward, GatedFeedForward, MultiHeadAttention, Block)
    return nodes(candidate, *kinds)


def stopped_gradient(subject: Subject, candidate: Any, random: Random) -> Mutated:
    path, node = choose(computing(candidate), random)

    def stopped(original: Any, self: Any, *a: Any, **k: Any) -> Any:
        return jax.lax.stop_gradient(original(*a, **k))

    replace_methods(node, __call__=stopped)
    return subject.mutated(path, "backward", "gradient stopped")


def scaled_gradient(subject: Subject, candidate: Any, random: Random) -> Mutated:
    path, node = choose(computing(candidate), random)
    factor = 1 + choose([1e-1, -1e-3, 1e-6], random)

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (g * factor,))

    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(same, original(*args, **kwargs))

    replace_methods(node, __call__=call)
    return subject.mutated(path, "backward", f"gradient times {factor}")


def narrow(subject: Subject, candidate: Any, random: Random) -> Mutated:
    path, node = choose(nodes(candidate, LayerNorm, RMSNorm), random)
    dtype = choose([jnp.float32, jnp.bfloat16], random)

    def call(original: Any, self: Any, x: Any) -> Any:
        return original(x.astype(dtype)).astype(x.dtype)

    replace_methods(node, __call__=call)
    return subject.mutated(path, "forward", f"computed in {dtype.__name__}")


MUTANTS: list[Mutant] = [
    eps, activation, transposed, permuted, head_order, zeroed_bias, one_element, swapped,
    mask_shift, model_mask, rotary_layout, rotary_base, attention_scale, soft_cap, embedding_scale,
    positions_shift, no_residual, norm_order, no_norm, stopped_gradient, scaled_gradient, narrow,
]  # fmt: skip


# Mutants of the reference, injected into a copy of the PyTorch module.
def choose_reference(subject: Subject, random: Random) -> tuple[str, str]:
    """Returns the path of a candidate module and of the reference module with the same arrays."""
    links = [each for each in subject.reference.plan.links if len(each.source) == 1]
    each = choose({e.source[0]: e for e in links}, random)[1]
    return each.target[0].rpartition(".")[0], each.source[0].rpartition(".")[0]


def reference_element(subject: Subject, reference: Any, random: Random) -> Mutated:
    candidate, path = choose_reference(subject, random)
    with torch.no_grad():
        weight = reference.get_submodule(path).weight
        weight[tuple(int(random.integers(size)) for size in weight.shape)] += 1e-3
    return subject.mutated(candidate, "parameters", f"an element of the reference's {path}")


def reference_output(subject: Subject, reference: Any, random: Random) -> Mutated:
    candidate, path = choose_reference(subject, random)
    reference.get_submodule(path).register_forward_hook(lambda module, given, out: out * (1 + 1e-6))
    return subject.mutated(candidate, "forward", f"the output of the reference's {path}")


def reference_gradient(subject: Subject, reference: Any, random: Random) -> Mutated:
    candidate, path = choose_reference(subject, random)
    reference.get_submodule(path).register_forward_hook(
        lambda module, given, out: 0.5 * out + (0.5 * out).detach()
    )
    return subject.mutated(candidate, "backward", f"the gradient of the reference's {path}")


REFERENCE_MUTANTS = [reference_element, reference_output, reference_gradient]
