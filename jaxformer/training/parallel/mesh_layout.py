"""Where a model's arrays lie on a mesh of devices, by the sharding rules."""

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxformer.execution.sharding import Attend, Mix
from jaxformer.layers import Dropout
from jaxformer.masks import expand_mask
from jaxformer.parameters import map_parameters, merge, split
from jaxformer.training.parallel.sharding_rules import (
    ACTIVATIONS,
    AXES,
    activation_spec,
    parameter_spec,
)


class MeshLayout:
    """Batches are split over data, fsdp and expert, heads and widths over tensor.

    See ``sharding.Layout``.

    A block's parameters are stored in parts along fsdp and put together when the block is computed,
    on the way forward and once more on the way back; gradients go straight to their parts.

    Args:
        mesh: with axes of ``sharding_rules.AXES``, all of them Auto.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.sizes = dict(mesh.shape)

    @property
    def gathers(self) -> bool:
        """Whether parameters are stored in parts along fsdp."""
        return self.sizes["fsdp"] > 1

    def lay_out(self, x: Array, letters: str) -> Array:
        """Returns ``x``, whose dimensions have these letters, split by their rules."""
        spec = activation_spec(letters, x.shape, self.sizes)
        return with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def gather(self, parameters: dict[str, Array]) -> dict[str, Array]:
        """Returns parameters whole along fsdp; their gradients come back in parts."""
        return {name: self._gather(name, value) for name, value in parameters.items()}

    def gather_module(self, module: nnx.Module) -> Any:
        """Returns a copy of the module around its gathered parameters."""
        return map_parameters(module, self.gather)

    def _gather(self, name: str, value: Array) -> Array:
        stored, used = (
            self.parameter_sharding(name, value.shape, axes)
            for axes in (AXES, ("tensor", "expert"))
        )
        return value if stored == used else _move(used, stored, value)

    def parameter_sharding(
        self, name: str, shape: tuple[int, ...], axes: Collection[str] = AXES
    ) -> NamedSharding:
        """Returns where a parameter lies if it is cut along these axes alone."""
        return NamedSharding(self.mesh, parameter_spec(name, shape, self.sizes, axes))

    def share_heads(
        self,
        attend: Attend,
        q_BTNH: Float[Array, "B T N H"],
        k_BSKH: Float[Array, "B S K H"],
        v_BSKH: Float[Array, "B S K H"],
        mask: Bool[Array, "B N T S"] | None,
        bias: Float[Array, "B N T S"] | None,
        dropout: Dropout,
        sinks: Float[Array, "N"] | None = None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"] | None]:
        """Calls ``attend`` on each device with its own sequences and heads.

        Key/value heads that are too few to be split are repeated first.
        """
        (batch, queries, heads), (keys, kv_heads) = q_BTNH.shape[:3], k_BSKH.shape[1:3]
        tensor = self.sizes["tensor"]
        repeats = tensor // math.gcd(kv_heads, tensor)
        if heads % tensor == 0 and repeats > 1:
            k_BSKH, v_BSKH = (jnp.repeat(x, repeats, axis=2) for x in (k_BSKH, v_BSKH))
        # Drawn for all sequences and heads at once, as a mask depends on its place in the batch.
        keep = dropout.keep((batch, heads, queries, keys))
        mask = None if mask is None else expand_mask(mask)
        # A mask that is known while tracing stays known only outside of the arguments.
        known = mask if isinstance(mask, np.ndarray) and mask.shape[:2] == (1, 1) else None
        arguments: list[tuple[Any, str]] = [
            (q_BTNH, "BTNH"),
            (k_BSKH, "BSKH"),
            (v_BSKH, "BSKH"),
            (None if known is not None else mask, "BNTS"),
            (bias, "BNTS"),
            (keep, "BNTS"),
            (sinks, "N"),
        ]

        def part(q: Array, k: Array, v: Array, mask: Any, bias: Any, keep: Any, sinks: Any) -> Any:
            local_dropout = Dropout(dropout.rate)
            local_dropout.deterministic, local_dropout.keep_mask = dropout.deterministic, keep
            more = () if sinks is None else (sinks,)
            return attend(q, k, v, known if mask is None else mask, bias, local_dropout, *more)

        specs = tuple(
            PartitionSpec() if x is None else activation_spec(letters, x.shape, self.sizes)
            for x, letters in arguments
        )
        weights = activation_spec("BNTS", (batch, heads, queries, keys), self.sizes)
        shared: Attend = jax.shard_map(
            part,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=(specs[0], weights),
            check_vma=False,
        )
        return shared(*(x for x, _ in arguments))

    def share_experts(
        self,
        mix: Mix,
        projections: Mapping[str, Any],
        rows: Float[Array, "R D"],
        chosen: Int[Array, "R C"],
        weights: Float[Array, "R C"],
        keep: Bool[Array, "RC F"] | None,
    ) -> Float[Array, "R D"]:
        """Calls ``mix`` on each device with its own rows, and its part of every expert.

        Along ``expert`` rows go to all devices, and what each one's experts make of them comes back
        as a sum. Along ``tensor`` all have the same rows, and a part of each expert's hidden
        features, so that their results are added up too.

        Args:
            mix: takes all others; an expert that it has not is called E.
            projections: by name, modules whose parameters have experts as their first dimension.
            rows: (R, D).
            chosen: the experts of each row, (R, C).
            weights: of the experts of each row, (R, C).
            keep: the mask of hidden dropout, (R · C, F), or None.
        """
        batch = tuple(axis for axis in ACTIVATIONS["B"] if axis in self.sizes)
        count, tensor = self.sizes.get("expert", 1), self.sizes.get("tensor", 1)
        kernel = projections["up_proj"].kernel
        experts, left = divmod(kernel.shape[0], count)
        if left or rows.shape[0] % math.prod(self.sizes[axis] for axis in batch):
            return mix(projections, rows, chosen, weights, keep)
        modules = {name: split(module) for name, module in projections.items()}
        parameters = {name: own for name, (_, own) in modules.items()}
        specs = {
            name: {
                leaf: parameter_spec(f"{name}.{leaf}", p.shape, self.sizes, ("expert", "tensor"))
                for leaf, p in own.items()
            }
            for name, own in parameters.items()
        }
        is_cut = tensor > 1 and kernel.shape[-1] % tensor == 0

        def part(parameters: Any, rows: Array, chosen: Array, weights: Array, keep: Any) -> Array:
            own = {name: merge(modules[name][0], held) for name, held in parameters.items()}
            bias = own["down_proj"].bias
            if is_cut and bias is not None:
                # It is added on one of the devices that share an expert.
                bias[...] = jnp.where(jax.lax.axis_index("tensor") == 0, bias[...], 0)
            if count > 1:
                rows, chosen, weights, keep = jax.tree.map(
                    _gather_experts, (rows, chosen, weights, keep)
                )
                local = chosen - jax.lax.axis_index("expert") * experts
                is_here = (local >= 0) & (local < experts)
                chosen = jnp.where(is_here, local, experts)
                weights = jnp.where(is_here, weights, 0)
            y = mix(own, rows, chosen, weights, keep)
            if is_cut:
                y = jax.lax.psum(y, "tensor")
            if count > 1:
                y = jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
            return y

        of_rows = PartitionSpec(batch)
        of_mask = PartitionSpec(batch, "tensor" if is_cut else None)
        shared: Any = jax.shard_map(
            part,
            mesh=self.mesh,
            in_specs=(specs, of_rows, of_rows, of_rows, None if keep is None else of_mask),
            out_specs=of_rows,
            check_vma=False,
        )
        return shared(parameters, rows, chosen, weights, keep)


def _gather_experts(x: Array) -> Array:
    """Returns the rows of all devices along ``expert``."""
    return jax.lax.all_gather(x, "expert", axis=0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(sharding: NamedSharding, gradient_sharding: NamedSharding, x: Array) -> Array:
    """Moves ``x`` to ``sharding``, and its gradient to ``gradient_sharding``."""
    return with_sharding_constraint(x, sharding)


def _move_forward(
    sharding: NamedSharding, gradient_sharding: NamedSharding, x: Array
) -> tuple[Array, None]:
    return with_sharding_constraint(x, sharding), None


def _move_backward(
    sharding: NamedSharding, gradient_sharding: NamedSharding, _: None, gradient: Array
) -> tuple[Array]:
    # Summed where it was made, then cut: if it is to be cut at once, the gradient of a table makes
    # XLA move the activations instead. The barrier keeps the sum from living on until the update.
    summed = with_sharding_constraint(gradient, sharding)
    return (jax.lax.optimization_barrier(with_sharding_constraint(summed, gradient_sharding)),)


_move.defvjp(_move_forward, _move_backward)
