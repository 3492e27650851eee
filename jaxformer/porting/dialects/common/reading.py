"""Reads settings of modules: what the dialects of PyTorch modules (not of config files) share."""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block, PreNormBlock
from jaxformer.errors import CheckpointError, UsageError
from jaxformer.feed_forward import FeedForward
from jaxformer.layers import Dropout
from jaxformer.norms import LayerNorm
from jaxformer.porting.mapping.rules import names
from jaxformer.porting.mapping.settings import unsupported
from jaxformer.porting.mapping.source_model import SourceModel

# The norms of a block of two branches, as many code bases call them.
NORMS = names(attention_norm="norm1", feed_forward_norm="norm2")
PLAIN_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
NUM_KV_HEADS = ("num_kv_heads", "n_kv_heads", "kv_heads", "num_key_value_heads")


def width_of(source_model: SourceModel, *projections: str) -> int:
    """Returns D, the most frequent size of the axes of projections from D to D features.

    Raises:
        CheckpointError: they are all missing.
    """
    found = [name for p in projections if source_model.has(name := f"{p}.weight")]
    shapes = [source_model.shape(name, 2) for name in found or [f"{projections[0]}.weight"]]
    # Where two are as frequent the first is taken: what the first projection takes in.
    return statistics.mode(size for shape in shapes for size in reversed(shape))


def attention_sizes(source_model: SourceModel, *projections: str) -> dict[str, Any]:
    """Returns D and N of an attention whose projections are all from D to D features."""
    d_model = width_of(source_model, *projections)
    return {"d_model": d_model, "num_heads": source_model.num_heads(d_model)}


def feed_forward(
    source_model: SourceModel, up: str, *, activation: str, rngs: nnx.Rngs, **settings: Any
) -> FeedForward:
    """Builds the plain feed-forward whose first projection is called ``up``."""
    d_ff, d_model = source_model.shape(f"{up}.weight", 2)
    return FeedForward(d_model, d_ff, activation=activation, rngs=rngs, **settings)


def layer_norm(source_model: SourceModel, path: str, *, use_bias: bool = True) -> LayerNorm:
    """Builds the layer norm at a path."""
    (features,) = source_model.shape(f"{path}.weight", 1)
    return LayerNorm(features, eps=source_model.eps(path), use_bias=use_bias)


def one_eps(source_model: SourceModel, *paths: str) -> float:
    """Returns what all norms at these paths add to the variance.

    Raises:
        UsageError: they differ.
    """
    found = {path: source_model.eps(path) for path in paths if source_model.has(path)}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{value:g} at {path}" for path, value in found.items())
        raise UsageError(
            f"unsupported: the norms of {source_model.kind} must have one eps: got {listed}"
        )
    return next(iter(found.values()), 1e-5)


def alike(
    modules: Iterable[SourceModel], read: Callable[[SourceModel], dict[str, Any]]
) -> dict[str, Any]:
    """Returns the settings that all these modules have.

    Raises:
        CheckpointError: there are none.
        UsageError: they differ.
    """
    found = list(modules)
    if not found:
        raise CheckpointError("missing all layers, which the sizes of the model are read from")
    first, *others = found
    settings = read(first)
    for number, other in enumerate(others, 1):
        # Of arrays alone there is nothing to read but shapes, which are all compared later.
        for name, value in read(other).items() if other.module is not None else ():
            if value != settings[name]:
                raise UsageError(
                    f"unsupported: {first.kind} number 0 and number {number} differ in {name}: "
                    f"{settings[name]!r} and {value!r}"
                )
    return settings


def activation_name(activation: Any) -> str:
    """Returns jaxformer's name of an activation: of a torch module, a function or a string.

    Raises:
        UsageError: it is unsupported.
    """
    name = activation
    if not isinstance(name, str):
        name = getattr(activation, "__name__", type(activation).__name__).lower()
    if getattr(activation, "approximate", "none") == "tanh":
        name += "_tanh"
    if name not in PLAIN_ACTIVATIONS:
        raise unsupported("activation", f"be one of {', '.join(PLAIN_ACTIVATIONS)}", activation)
    return str(name)


def demand_activation(source_model: SourceModel, path: str, name: str) -> str:
    """Returns the name, if the activation at a path is not another one.

    Raises:
        UsageError: it is.
    """
    module = source_model.child(path).module
    found = name if module is None else activation_name(module)
    if found != name:
        raise UsageError(f"unsupported: {path} of {source_model.kind} must be {name}: got {found}")
    return name


def describe(module: Any) -> dict[str, Any]:
    """Returns the settings of a jaxformer module that the shapes of its arrays do not show."""
    nodes = [node for _, node in nnx.iter_modules(module)]
    settings: dict[str, Any] = {
        "dropout": max((n.rate for n in nodes if isinstance(n, Dropout)), default=0.0)
    }
    for node in nodes:
        if isinstance(node, MultiHeadAttention):
            settings["num_heads"] = node.num_heads
        if isinstance(node, Block):
            settings["pre_norm"] = isinstance(node, PreNormBlock)
    return settings


def is_pre_norm(source_model: SourceModel) -> bool:
    """Whether a block is pre-norm, from a setting; the arrays are the same."""
    return bool(source_model.setting("pre_norm", "norm_first"))
