"""The resources of a training step by arithmetic alone, for devices that nothing here compiles for.

The bytes of parameters and moments are exact. Those of gradients, activations and the rest are a
model of what XLA keeps; ``tests/planning/test_scale.py`` compares it with real compilations and
states its error. It leaves out dropout masks, position schemes and norms of queries and keys: their
arrays are small, or XLA fuses them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxformer.adapters import trained_parameters
from jaxformer.config import EncoderDecoderConfig
from jaxformer.execution.chunked_loss import positions_at_once
from jaxformer.layers import Linear
from jaxformer.optimizers import make_optimizer
from jaxformer.parameters import join_path
from jaxformer.planning.block_kinds import BlockKind, find_kinds
from jaxformer.planning.collectives import Collective, merge
from jaxformer.training.config import TrainConfig
from jaxformer.training.parallel.sharding_rules import (
    ShardedParameter,
    is_of_experts,
    sharding_table,
)
from jaxformer.training.state_arrays import moments_of

FLOAT32 = 4
# What the backward pass of one block holds, fitted to the compilations of benchmarks/scale.py.
# Weights gathered along fsdp, as a multiple of one block's: its own, and those of the next block or
# gradients in transfer. Arrays, as a multiple of those of its forward pass: these and gradients.
WEIGHTS_AT_ONCE = 1.6
ARRAYS_AT_ONCE = 1.65


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """The memory that a step takes of one device, in bytes, and the work of all devices in it.

    Attributes:
        parameter_count: how many numbers the model learns.
        active_count: those of them that compute a token: of experts, the chosen ones.
        parameters: bytes of those that a device holds.
        moments: bytes of what the optimizer keeps.
        gradients: bytes of one for each parameter, and of their sum over micro-batches.
        activations: bytes that one micro-batch keeps for its backward pass.
        temporary: all other bytes at the peak: gathered weights, logits, a block's own arrays.
        traffic: bytes through the device's memory.
        model_operations: of matrix products on all devices, nothing counted twice.
        operations: those that are computed, including what ``remat`` computes again.
        collectives: between the devices.
    """

    parameter_count: int
    active_count: int
    parameters: int
    moments: int
    gradients: int
    activations: int
    temporary: int
    traffic: int
    model_operations: int
    operations: int
    collectives: tuple[Collective, ...]

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        state = self.parameters + self.moments
        return state + self.gradients + self.activations + self.temporary


def estimate_step(config: TrainConfig, mesh: Mapping[str, int]) -> StepEstimate:
    """Returns the resources of one step, estimated.

    Args:
        config: with ``model.vocab_size`` set.
        mesh: sizes of the axes data, fsdp and tensor, and expert where there is one.

    Raises:
        ValueError: a parameter has no sharding rule.
    """
    return _StepModel(config, mesh).estimate()


class _StepModel:
    """The arithmetic of one step on one device of a mesh."""

    def __init__(self, config: TrainConfig, mesh: Mapping[str, int]):
        self.config, self.mesh = config, mesh
        self.module, self.kinds = find_kinds(config, mesh)
        flat = nnx.to_flat_state(nnx.state(self.module, nnx.Param))
        shapes = {join_path(path): variable.get_value() for path, variable in flat}
        self.table = sharding_table(shapes, mesh)
        self.width = 2 if config.dtype == "bfloat16" else FLOAT32
        # Those of targets, which have logits, come last.
        self.tokens = self.kinds[-1].tokens
        # Of all stacks, each once.
        self.all_tokens = sum(kind.tokens for kind in self._stacks())
        self.stored = self._elements(lambda row: math.prod(row.part))
        trained: Any = trained_parameters(shapes)
        self.trained = self._elements(lambda r: math.prod(r.part) if r.name in trained else 0)
        # Of a block of each kind, as a device computes with it.
        self.whole_blocks = [
            sum(
                math.prod(r.part) * (mesh["fsdp"] if r.is_cut("fsdp") else 1)
                for r in self.table
                if r.name.startswith(kind.prefix)
            )
            for kind in self.kinds
        ]

    def _stacks(self) -> list[BlockKind]:
        """Returns a kind of each stack."""
        stacks = {kind.prefix.partition("blocks")[0]: kind for kind in self.kinds}
        return list(stacks.values())

    def _elements(self, count: Callable[[ShardedParameter], int]) -> int:
        """Returns a sum over all parameters."""
        return sum(count(row) * self._blocks(row) for row in self.table)

    def _kind_of(self, row: ShardedParameter) -> BlockKind | None:
        """Returns the kind of block that a parameter is of, None of what is around the blocks."""
        return next((kind for kind in self.kinds if row.name.startswith(kind.prefix)), None)

    def _blocks(self, row: ShardedParameter) -> int:
        """Returns how often a parameter is there."""
        kind = self._kind_of(row)
        return 1 if kind is None else kind.blocks

    def _layers(self, row: ShardedParameter) -> int:
        """Returns how often a parameter is used by a pass."""
        kind = self._kind_of(row)
        return 1 if kind is None else kind.layers

    def _active(self, row: ShardedParameter) -> int:
        """Returns how many numbers of a parameter compute a token."""
        experts = self.config.model.feed_forward.experts
        elements = math.prod(row.shape)
        if not is_of_experts(row.name, row.shape):
            return elements
        return elements * experts.experts_per_token // row.shape[0]

    def estimate(self) -> StepEstimate:
        """Returns the whole estimate."""
        model_operations, operations = self._operations()
        return StepEstimate(
            parameter_count=self._elements(lambda row: math.prod(row.shape)),
            active_count=self._elements(self._active),
            parameters=FLOAT32 * self.stored,
            moments=self._moments(),
            gradients=self._gradient_sum() + self._gradients(),
            activations=self._kept(self.config.remat)
            + self.all_tokens * self.width * self._d_model(),
            temporary=self._temporary(),
            traffic=self._traffic(),
            model_operations=model_operations,
            operations=operations,
            collectives=tuple(self._collectives()),
        )

    def _moments(self) -> int:
        """Returns the bytes of what the optimizer keeps, and of its counts of steps."""
        rows = {row.name: row for row in self.table}
        shapes: Any = {n: jax.ShapeDtypeStruct(r.shape, jnp.float32) for n, r in rows.items()}
        init = make_optimizer(self.config.optimizer).init
        state = jax.eval_shape(init, trained_parameters(shapes))
        moments = moments_of(state)
        counts = len(jax.tree.leaves(state)) - len(jax.tree.leaves(moments))
        kept = sum(
            self._blocks(rows[name])
            # What has another shape than its parameter lies whole on every device.
            * math.prod(rows[name].part if leaf.shape == rows[name].shape else leaf.shape)
            for group in moments.values()
            for name, leaf in group.items()
        )
        return FLOAT32 * (kept + counts)

    def _kept(self, remat: str) -> int:
        """Returns the bytes of a micro-batch that all blocks keep."""
        return self._over_layers([kind.kept(remat, self.width) for kind in self.kinds])

    def _over_layers(self, of_kinds: Sequence[int]) -> int:
        """Returns the sum over all layers of what a layer of each kind has."""
        return sum(kind.layers * each for kind, each in zip(self.kinds, of_kinds, strict=True))

    def _d_model(self) -> int:
        return self.config.model.d_model

    def _gradient_sum(self) -> int:
        """Returns the bytes of the sum of the micro-batches' gradients, in float32."""
        return FLOAT32 * self.trained if self.config.accumulation > 1 else 0

    def _gradients(self) -> int:
        """Returns the bytes of the gradients of one micro-batch, in the dtype of the products.

        A loop over the blocks returns all of them at its end; else each is added at once.
        """
        at_once = self.config.accumulation == 1 or self.config.scan_layers
        return self.width * self.trained if at_once else 0

    def _temporary(self) -> int:
        """Returns the bytes at the peak beside state, gradients and activations.

        They are a copy of the parameters in the dtype of the products, and the larger of two: in
        a block's backward pass, its weights and arrays without those that were kept; in the loss,
        the tables and the logits of one chunk, when this micro-batch has no gradients yet.
        """
        copies = self.width * self.stored if self.width < FLOAT32 else 0
        gathers = self.mesh["fsdp"] > 1
        blocks = []
        for kind, whole in zip(self.kinds, self.whole_blocks, strict=True):
            arrays = ARRAYS_AT_ONCE * kind.kept("none", self.width)
            arrays -= kind.kept(self.config.remat, self.width)
            weights = WEIGHTS_AT_ONCE * self.width * whole if gathers else 0
            blocks.append(arrays + weights)
        loss = self.tokens * self.width * self._vocabulary() / self._chunks()
        if gathers:
            loss += self.width * self._tables()
        return copies + int(max(*blocks, loss - self._gradients()))

    def _vocabulary(self) -> int:
        """Returns how many logits of a token a device has."""
        model: Any = self.config.model
        is_pair = isinstance(model, EncoderDecoderConfig)
        size = (model.target_vocab_size if is_pair else model.vocab_size) or 0
        return self._part_of(size)

    def _part_of(self, size: int) -> int:
        return size // self.mesh["tensor"] if size % self.mesh["tensor"] == 0 else size

    def _chunks(self) -> int:
        """Returns in how many chunks the logits of a micro-batch are computed; one on a mesh."""
        if self.config.strategy == "mesh" and math.prod(self.mesh.values()) > 1:
            return 1
        length = self.config.window
        rows = self.tokens // length
        return math.ceil(length / positions_at_once(rows, length, self._vocabulary(), self.width))

    def _operations(self) -> tuple[int, int]:
        """Returns a step's operations on all devices: of the model, and with what is repeated."""
        forward = [kind.operations() for kind in self.kinds]
        both = [sum(each.values()) for each in forward]
        repeated = {"none": [0] * len(both), "full": both}
        repeated["dots"] = [each["attention"] for each in forward]
        again = self._over_layers(repeated[self.config.remat])
        once = 3 * (self._over_layers(both) + 2 * self.config.window * self._head_elements())
        return self.config.batch_size * once, self.config.batch_size * (once + again)

    def _head_elements(self) -> int:
        """Returns the elements of the matrices that a target's logits are multiplied with."""
        module = self.module
        transform = getattr(module, "head_transform", None)
        heads = [transform and transform.proj, module.lm_head]
        elements = sum(part.kernel.size for part in heads if isinstance(part, Linear))
        if self.config.model.head.tie_embeddings:
            table = getattr(module, "target_embedding", None) or module.token_embedding
            elements += table.embedding.size
        return int(elements)

    def _traffic(self) -> int:
        """Returns the bytes through a device's memory: of update, weights and activations.

        The update reads parameter, moments and gradient and writes all but the gradient; the
        gradient is written, and read once more for its norm. Weights are read by each pass, and
        written where fsdp gathers them. The results of a pass are written and read once; the
        backward pass computes as much again, from as much.
        """
        passes = 3 if self.config.remat == "full" else 2
        update = FLOAT32 * self.trained * 5 + 2 * self._moments()
        weights = self.width * (self._over_layers(self.whole_blocks) + self._tables())
        weights *= passes * (2 if self.mesh["fsdp"] > 1 else 1) + 2
        made = self._kept("none")
        made += self.tokens * self.width * self._vocabulary()
        head = self._vocabulary() * self._d_model()
        # Each further chunk reads the head once more in each pass, and adds to its gradient.
        weights += (self._chunks() - 1) * head * 2 * (self.width + FLOAT32)
        return update + self.config.accumulation * (weights + 2 * made * passes)

    def _tables(self) -> int:
        """Returns the elements of embeddings and the head, as one device computes with them."""
        model, rows = self.config.model, 2 * self._vocabulary()
        if isinstance(model, EncoderDecoderConfig) and not model.embedding.shared_embedding:
            rows += self._part_of(model.source_vocab_size)
        return rows * self._d_model()

    def _collectives(self) -> list[Collective]:
        """Returns the collectives that ``sharding_rules`` makes necessary."""
        mesh, width, count = self.mesh, self.width, self.config.accumulation
        found = []
        if mesh["fsdp"] > 1:
            # Gathered for the forward pass and once more for the backward pass; each device sums
            # the part of the gradient that it keeps.
            cut = [row for row in self.table if row.is_cut("fsdp")]
            inside = [row for row in cut if self._kind_of(row) is not None]
            times, again = (count * sum(map(self._layers, rows)) for rows in (cut, inside))
            payload, once_more = (
                count * width * sum(self._layers(row) * math.prod(row.part) for row in rows)
                for rows in (cut, inside)
            )
            uncut = self._elements(lambda r: 0 if r.is_cut("fsdp") else math.prod(r.part))
            devices = mesh["fsdp"]
            found += [
                Collective("all-gather", ("fsdp",), devices, times + again, payload + once_more),
                Collective("reduce-scatter", ("fsdp",), devices, times, payload * devices),
                # Norms, and what fsdp does not divide.
                Collective("all-reduce", ("fsdp",), devices, count, count * FLOAT32 * uncut),
            ]
        if (devices := mesh.get("expert", 1)) > 1:
            # Rows go to all experts and their outputs come back, on the way forward and back.
            layers = sum(kind.layers for kind in self.kinds if kind.widths.routed)
            times, rows = 2 * count * layers, width * self.tokens * self._d_model()
            shared = self._elements(lambda r: 0 if r.is_cut("expert") else math.prod(r.part))
            found += [
                Collective("all-gather", ("expert",), devices, times, times * rows),
                Collective("reduce-scatter", ("expert",), devices, times, times * rows * devices),
                Collective("all-reduce", ("expert",), devices, 1, FLOAT32 * shared),
            ]
        if mesh["data"] > 1:
            payload = FLOAT32 * self.trained
            found.append(Collective("all-reduce", ("data",), mesh["data"], 1, payload))
        if mesh["tensor"] > 1:
            # One of each branch in each pass of a block, and two of each stack: the embedding's
            # rows, and the gradient of the head's input or of what a decoder reads.
            passes = 3 if self.config.remat == "full" else 2
            sums = [(kind.sums * passes * kind.layers, kind.tokens) for kind in self.kinds]
            sums += [(2, kind.tokens) for kind in self._stacks()]
            times = count * sum(number for number, _ in sums)
            payload = count * width * self._d_model() * sum(n * tokens for n, tokens in sums)
            found.append(Collective("all-reduce", ("tensor",), mesh["tensor"], times, payload))
        return merge(found)
