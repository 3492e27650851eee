"""What devices send each other, read from programs: by hand, and from XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxformer.planning.collectives import Collective, merge, read_collectives

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
# Two steps' loop of unknown length around a scan of five layers, as XLA prints them.
PROGRAM = """
HloModule jit_steps, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%layer (p: (s32[], bf16[8,16], bf16[4,3])) -> (s32[], bf16[8,16], bf16[4,3]) {
  %p = (s32[], bf16[8,16]{1,0}, bf16[4,3]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[8,16]{1,0} get-tuple-element(%p), index=1
  %w = bf16[4,3]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=2
  %gather = (bf16[4,3]{1,0}, bf16[8,3]{1,0}) all-gather-start(%w), \
replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}
  %whole = bf16[8,3]{1,0} all-gather-done(%gather)
  %y = bf16[8,16]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %t = (s32[], bf16[8,16]{1,0}, bf16[4,3]{1,0}) tuple(%i, %y, %w)
}

%more (p.1: (s32[], bf16[8,16], bf16[4,3])) -> pred[] {
  %p.1 = (s32[], bf16[8,16]{1,0}, bf16[4,3]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

%all-reduce-scatter.1 (q: f32[64]) -> f32[8] {
  %q = f32[64]{0} parameter(0)
  %r = f32[64]{0} all-reduce(%q), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %d = f32[8]{0} dynamic-slice(%r, %q), dynamic_slice_sizes={8}
}

%step (p.2: (s32[], bf16[8,16], bf16[4,3])) -> (s32[], bf16[8,16], bf16[4,3]) {
  %p.2 = (s32[], bf16[8,16]{1,0}, bf16[4,3]{1,0}) parameter(0)
  %layers = (s32[], bf16[8,16]{1,0}, bf16[4,3]{1,0}) while(%p.2), condition=%more, \
body=%layer, backend_config={"known_trip_count":{"n":"5"}}
  %g = f32[64]{0} constant({...})
  %f = f32[8]{0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  %alone = f32[8]{0} all-reduce(%f), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %next = f32[8]{0} collective-permute(%f), source_target_pairs={{0,4},{4,0}}
  ROOT %t.1 = (s32[], bf16[8,16]{1,0}, bf16[4,3]{1,0}) copy(%layers)
}

ENTRY %main (p.3: (s32[], bf16[8,16], bf16[4,3])) -> (s32[], bf16[8,16], bf16[4,3]) {
  %p.3 = (s32[], bf16[8,16]{1,0}, bf16[4,3]{1,0}) parameter(0)
  ROOT %w.1 = (s32[], bf16[8,16]{1,0}, bf16[4,3]{1,0}) while(%p.3), condition=%more, body=%step
}
"""


def test_loops_count_and_groups_name_axes():
    found = {(c.kind, c.axes): c for c in read_collectives(PROGRAM, MESH)}
    assert found == {
        ("all-reduce", ("tensor",)): Collective("all-reduce", ("tensor",), 2, 5, 5 * 256),
        ("all-gather", ("fsdp",)): Collective("all-gather", ("fsdp",), 2, 5, 5 * 24),
        ("reduce-scatter", ("data", "fsdp", "tensor")): Collective(
            "reduce-scatter", ("data", "fsdp", "tensor"), 8, 1, 256
        ),
        ("collective-permute", ("data",)): Collective("collective-permute", ("data",), 2, 1, 32),
    }
    assert [c.count for c in read_collectives(PROGRAM, MESH, steps=3)] == [15, 3, 15, 3]


def test_what_a_device_sends_by_the_ring_algorithms():
    def sent(kind):
        return Collective(kind, ("fsdp",), 4, 1, 120).sent

    assert sent("all-gather") == 360
    assert sent("reduce-scatter") == sent("all-to-all") == 90
    assert sent("all-reduce") == 180
    assert sent("collective-permute") == 120


def test_the_same_over_the_same_axes_are_one():
    one = Collective("all-gather", ("fsdp",), 2, 3, 10)
    other = Collective("all-gather", ("tensor",), 2, 1, 50)
    assert merge([one, other, one]) == [other, Collective("all-gather", ("fsdp",), 2, 6, 20)]


@pytest.mark.parametrize(
    ("written", "axes", "devices"),
    [
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1'}", ("fsdp",), 2),
        (
            # Devices 0, 4, 1, 5 …: what varies last is data.
            "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}",
            ("data",),
            2,
        ),
        # A part of an axis of four: its first half is fsdp, its second tensor.
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1':(1)2}", ("fsdp",), 2),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1':(2)2}", ("data", "tensor"), 4),
        ("{}", ("data", "fsdp", "tensor"), 8),
    ],
)
def test_other_ways_to_write_groups(written, axes, devices):
    text = PROGRAM.replace("replica_groups=[1,8]<=[8]", f"replica_groups={written}")
    found = {c.kind: c for c in read_collectives(text, MESH)}["reduce-scatter"]
    assert (found.axes, found.devices) == (axes, devices)


def test_loops_of_a_tpu_say_their_length_in_their_condition():
    text = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"5"}}', "").replace(
        "condition=%more, body=%layer", "condition=%five, body=%layer"
    )
    text += """
%five (p.4: (s32[], bf16[8,16], bf16[4,3])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %p.4 = (s32[]{:T(128)}, bf16[8,16]{1,0}, bf16[4,3]{1,0}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%p.4), index=0
  ROOT %lt = pred[]{:T(512)} compare(%at, %limit), direction=LT
}
"""
    assert read_collectives(text, MESH) == read_collectives(PROGRAM, MESH)


def test_a_loop_may_count_by_twos():
    text = """
%body (p: (u32[], f32[8])) -> (u32[], f32[8]) {
  %p = (u32[], f32[8]{0}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %two..sunk = u32[]{:T(128)} constant(2)
  %next = u32[]{:T(128)} add(%i, %two..sunk)
  %there = f32[8]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %back = f32[8]{0} collective-permute(%x), channel_id=2, source_target_pairs={{1,0},{0,1}}
  ROOT %t = (u32[], f32[8]{0}) tuple(%next, %there)
}

%less (p.1: (u32[], f32[8])) -> pred[] {
  %limit = u32[] constant(7)
  %p.1 = (u32[], f32[8]{0}) parameter(0)
  %at = u32[] get-tuple-element(%p.1), index=0
  ROOT %lt = pred[] compare(%at, %limit), direction=LT
}

ENTRY %main (p.2: (u32[], f32[8])) -> (u32[], f32[8]) {
  %p.2 = (u32[], f32[8]{0}) parameter(0)
  ROOT %w = (u32[], f32[8]{0}) while(%p.2), condition=%less, body=%body
}
"""
    (found,) = read_collectives(text, {"fsdp": 2})
    assert found == Collective("collective-permute", ("fsdp",), 2, 8, 8 * 32)


def test_parts_of_one_collective_count_once():
    once = PROGRAM.replace("replica_groups=[4,2]", "channel_id=9, replica_groups=[4,2]")
    twice = once.replace(
        "%whole =",
        "%again = (bf16[4,3]{1,0}, bf16[8,3]{1,0}) all-gather-start("
        "%w), channel_id=9, replica_groups=[4,2]<=[2,2,2]T(0,2,1)\n  %whole =",
    )
    assert read_collectives(twice, MESH) == read_collectives(PROGRAM, MESH)


def test_groups_in_an_unknown_form_are_not_passed_over():
    with pytest.raises(ValueError, match="groups of a collective cannot be read"):
        read_collectives(PROGRAM.replace("replica_groups=[1,8]<=[8]", "replica_groups=?"), MESH)


def test_a_program_of_xla():
    """Layers of a matrix cut by its rows: one sum over the devices for each of them."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def place(*spec):
        return NamedSharding(mesh, PartitionSpec(*spec))

    def layers(x, weights):
        def layer(x, w):
            x = jax.lax.with_sharding_constraint(jnp.tanh(x), place("data", "tensor"))
            return jax.lax.with_sharding_constraint(x @ w, place("data", None)), None

        return jax.lax.scan(layer, x, weights)[0]

    shapes = [((6, 16), ("data", None)), ((7, 16, 16), (None, "tensor", None))]
    arguments = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=place(*spec)) for shape, spec in shapes
    ]
    text = jax.jit(layers).lower(*arguments).compile().as_text()
    (found,) = read_collectives(text, {"data": 2, "tensor": 4})
    assert found == Collective("all-reduce", ("tensor",), 4, 7, 7 * 3 * 16 * 4)
