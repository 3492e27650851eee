"""Where a model's arrays lie on a mesh of devices, by the sharding rules."""

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from jaxformer.execution.sharding import Attend, Mix
from jaxformer.layers import Dropout, widen
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
        self, mix: Mix, projections: Sequence[Any], rows: Array, *arrays: Array | None
    ) -> Array:
        """Calls ``mix`` on each device with its own rows.

        Along ``expert`` rows go to all devices, and what each one's experts make of them comes back
        as a sum.

        Args:
            mix: takes all others; an expert that it has not is called E.
            projections: modules whose parameters have experts as their first dimension.
            rows: (R, D).
            arrays: the experts of each row (R, C), their weights (R, C), and a mask or None.
        """
        batch = tuple(axis for axis in ACTIVATIONS["B"] if axis in self.sizes)
        count = self.sizes.get("expert", 1)
        experts, left = divmod(projections[0].kernel.shape[0], count)
        if left or rows.shape[0] % math.prod(self.sizes[axis] for axis in batch):
            return mix(projections, rows, *arrays)
        split_modules = [split(module) for module in projections]
        dtypes = [{name: p.dtype for name, p in own.items()} for _, own in split_modules]

        def part(parameters: Any, place: Array, arrays: Any) -> Array:
            modules = [
                merge(definition, {name: p.astype(known[name]) for name, p in own.items()})
                for (definition, _), own, known in zip(
                    split_modules, parameters, dtypes, strict=True
                )
            ]
            if count == 1:
                return mix(modules, *arrays)
            every_row, chosen, weights, keep = jax.tree.map(_gather_experts, arrays)
            local = chosen - place[0] * experts
            is_here = (local >= 0) & (local < experts)
            local = jnp.where(is_here, local, experts)
            y = mix(modules, every_row, local, jnp.where(is_here, weights, 0), keep)
            summed = jax.lax.psum_scatter(_for_sums(y), "expert", scatter_dimension=0, tiled=True)
            return summed.astype(y.dtype)

        own = PartitionSpec("expert") if count > 1 else PartitionSpec()
        shared: Any = jax.shard_map(
            part,
            mesh=self.mesh,
            in_specs=(own, own, PartitionSpec(batch)),
            out_specs=PartitionSpec(batch),
            axis_names=set(batch),
            check_vma=False,
        )
        # A device's place along an axis cannot be asked for where another axis is Auto.
        places = jnp.arange(count)
        parameters = [jax.tree.map(_for_sums, own) for _, own in split_modules]
        return shared(parameters, places, (rows, *arrays))


def _gather_experts(x: Array) -> Array:
    """Returns the rows of all devices along ``expert``."""
    whole = jax.lax.all_gather(_for_sums(x), "expert", axis=0, tiled=True)
    return whole.astype(x.dtype)


def _for_sums(x: Array) -> Array:
    """Returns ``x`` in the dtype in which it, or its gradient, is summed over devices.

    XLA's CPU compiler adds bfloat16 in float32. Where some axes of the mesh are Auto, it ends the
    process while it makes that sum, so there the sum is float32 from the start.
    """
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jax.default_backend() == "cpu"
    return widen(x) if is_narrow else x


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
