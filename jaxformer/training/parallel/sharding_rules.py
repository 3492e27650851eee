"""Which dimension of which parameter lies along which axis of the mesh.

Matrices into heads or into the feed-forward's width are cut by their outputs along ``tensor``,
those out of them by their inputs, so that a branch needs one sum over ``tensor`` (Shoeybi et al.,
arXiv 1909.08053, section 3). Along ``fsdp`` every matrix is cut, in parts that are put together
where they are used (Rajbhandari et al., arXiv 1910.02054, section 5.3): by its inputs, as XLA for
TPUs sums a gradient straight into parts only where those are of the first dimension. Vectors of the
model's width are small, and whole on every device. Along ``expert`` each device has some of the
experts, and a part of the batch (Lepikhin et al., arXiv 2006.16668, section 3.2).
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from jax.sharding import PartitionSpec

Axis = Literal["data", "fsdp", "expert", "tensor"]
# A mesh has the axis of experts only where they are shared.
AXES: tuple[Axis, ...] = ("data", "fsdp", "expert", "tensor")

# By module and parameter, one entry per dimension; None is whole.
RULES: dict[str, tuple[Axis | tuple[Axis, ...] | None, ...]] = {
    "token_embedding.embedding": ("tensor", "fsdp"),
    "token_type_embedding.embedding": (None, "fsdp"),
    "task_type_embedding.embedding": (None, "fsdp"),
    # Between a narrow table and the model.
    "embedding_projection.kernel": ("fsdp", None),
    "embedding_projection.bias": (None,),
    "output_projection.kernel": ("fsdp", None),
    "source_embedding.embedding": ("tensor", "fsdp"),
    "target_embedding.embedding": ("tensor", "fsdp"),
    "position_embedding.embedding": (None, "fsdp"),
    "source_position_embedding.embedding": (None, "fsdp"),
    "position.embedding": (None, None),
    "q_proj.kernel": ("fsdp", "tensor"),
    "k_proj.kernel": ("fsdp", "tensor"),
    "v_proj.kernel": ("fsdp", "tensor"),
    "o_proj.kernel": (("tensor", "fsdp"), None),
    "q_proj.bias": ("tensor",),
    "k_proj.bias": ("tensor",),
    "v_proj.bias": ("tensor",),
    "o_proj.bias": (None,),
    "up_proj.kernel": ("fsdp", "tensor"),
    "gate_proj.kernel": ("fsdp", "tensor"),
    "down_proj.kernel": (("tensor", "fsdp"), None),
    "up_proj.bias": ("tensor",),
    "gate_proj.bias": ("tensor",),
    "down_proj.bias": (None,),
    "router.choice_bias": (None,),
    "shared_expert_gate.kernel": (None, None),
    "xielu.alpha_p": (None,),
    "xielu.alpha_n": (None,),
    "embedding_norm.scale": (None,),
    "embedding_norm.bias": (None,),
    "source_embedding_norm.scale": (None,),
    "source_embedding_norm.bias": (None,),
    "target_embedding_norm.scale": (None,),
    "target_embedding_norm.bias": (None,),
    "cross_attention_norm.scale": (None,),
    "cross_attention_norm.bias": (None,),
    "cross_attention_output_norm.scale": (None,),
    "cross_attention_output_norm.bias": (None,),
    "attention_norm.scale": (None,),
    "attention_norm.bias": (None,),
    "attention_output_norm.scale": (None,),
    "attention_output_norm.bias": (None,),
    "feed_forward_norm.scale": (None,),
    "feed_forward_norm.bias": (None,),
    "feed_forward_output_norm.scale": (None,),
    "feed_forward_output_norm.bias": (None,),
    "attention.sinks": ("tensor",),
    "q_down_proj.kernel": ("fsdp", None),
    "q_down_proj.bias": (None,),
    "q_up_proj.kernel": ("fsdp", "tensor"),
    "kv_down_proj.kernel": ("fsdp", None),
    "kv_down_proj.bias": (None,),
    "kv_norm.scale": (None,),
    "kv_norm.bias": (None,),
    "kv_up_proj.kernel": ("fsdp", "tensor"),
    "q_norm.scale": (None,),
    "q_norm.bias": (None,),
    "k_norm.scale": (None,),
    "k_norm.bias": (None,),
    "final_norm.scale": (None,),
    "final_norm.bias": (None,),
    # BERT's masked-LM head and pooler.
    "proj.kernel": ("fsdp", None),
    "proj.bias": (None,),
    "norm.scale": (None,),
    "norm.bias": (None,),
    "pooler.kernel": ("fsdp", None),
    "pooler.bias": (None,),
    "lm_head.kernel": ("fsdp", "tensor"),
    "lm_head.bias": ("tensor",),
    # Adapters are small.
    "lora_a.kernel": (None, None),
    "lora_b.kernel": (None, None),
}

# What an expert has of its own.
EXPERTS = ("gate_proj.", "up_proj.", "down_proj.")
# Activations, by the dimension letters of ``jaxformer``; the others are whole.
ACTIVATIONS: dict[str, tuple[Axis, ...]] = {
    "B": ("expert", "data", "fsdp"),
    "N": ("tensor",),
    "K": ("tensor",),
}


def rule_name(parameter: str) -> str:
    """Returns the key of a parameter's rule: its module's name and its own, ``q_proj.kernel``."""
    return ".".join(parameter.split(".")[-2:])


def is_of_experts(parameter: str, shape: tuple[int, ...]) -> bool:
    """Returns whether a parameter has an entry, as its first dimension, for each expert."""
    name = rule_name(parameter)
    return name.startswith(EXPERTS) and len(RULES[name]) == len(shape) - 1


def check_rules(parameters: Iterable[str]) -> None:
    """Checks that every parameter has a rule.

    Raises:
        ValueError: some have none; all of them are listed.
    """
    missing = [name for name in parameters if rule_name(name) not in RULES]
    if missing:
        raise ValueError(
            f"no sharding rule for {', '.join(missing)}: add one to RULES in {__name__}"
        )


def parameter_spec(
    name: str,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    axes: Collection[str] = AXES,
) -> PartitionSpec:
    """Returns how a parameter lies on a mesh, without axes that do not divide its dimension.

    Args:
        name: its path.
        shape: of all of it.
        sizes: of the mesh's axes.
        axes: those to cut it along.

    Raises:
        ValueError: the rule has another number of dimensions.
    """
    rule = RULES[rule_name(name)]
    if not any(rule) and not is_of_experts(name, shape):
        # A norm with a row a head has one dimension more.
        return PartitionSpec(*(None for _ in shape))
    if is_of_experts(name, shape):
        # Experts have a matrix each: a device has whole experts, or its part of all of them.
        rule = ("expert", *rule)
    if len(rule) != len(shape):
        raise ValueError(f"the rule {rule} does not fit {name} of shape {shape}")
    dimensions: list[str | tuple[str, ...] | None] = []
    for entry, length in zip(rule, shape, strict=True):
        found: list[str] = []
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            if axis in axes and sizes.get(axis, 1) > 1 and length % sizes[axis] == 0:
                length //= sizes[axis]
                found.append(axis)
        dimensions.append(tuple(found) if len(found) > 1 else found[0] if found else None)
    return PartitionSpec(*dimensions)


def activation_spec(
    letters: str, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> PartitionSpec:
    """Returns how an activation with these dimensions lies on a mesh; see ``parameter_spec``.

    Axes of one device are named too: ``jax.shard_map`` sums gradients over axes that are not named.
    """
    dimensions: list[tuple[Axis, ...] | None] = []
    for letter, length in zip(letters, shape, strict=True):
        axes = tuple(axis for axis in ACTIVATIONS.get(letter, ()) if axis in sizes)
        fits = axes and length % math.prod(sizes[axis] for axis in axes) == 0
        dimensions.append(axes if fits else None)
    return PartitionSpec(*dimensions)


@dataclasses.dataclass(frozen=True)
class ShardedParameter:
    """How one parameter lies on a mesh.

    Attributes:
        name: its path.
        shape: of all of it.
        axes: the mesh axes that cut each dimension.
        part: the shape of what one device holds.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    part: tuple[int, ...]

    def is_cut(self, axis: str) -> bool:
        """Returns whether it is cut along an axis."""
        return any(axis in axes for axes in self.axes)


def sharding_table(shapes: Mapping[str, Any], sizes: Mapping[str, int]) -> list[ShardedParameter]:
    """Returns how every parameter lies on a mesh.

    Args:
        shapes: arrays or their shapes, by path.
        sizes: of the mesh's axes.

    Raises:
        ValueError: a parameter has no rule.
    """
    check_rules(shapes)
    table = []
    for name, value in shapes.items():
        spec = parameter_spec(name, value.shape, sizes)
        axes = tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in spec)
        part = tuple(
            length // math.prod(sizes[axis] for axis in dimension)
            for length, dimension in zip(value.shape, axes, strict=True)
        )
        table.append(ShardedParameter(name, tuple(value.shape), axes, part))
    return table
