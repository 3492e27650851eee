"""A state in parts, saved and restored; also by several processes, each of which runs this file.

python -m tests.support.sharded_state PORT INDEX COUNT FOLDER ACTION:STEP:LAYOUT...
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.checkpoints import CheckpointFolder, describe
from jaxformer.errors import JaxformerError

ABOUT = {"config": {"seed": 1}, "vocabulary": "ab", "corpus": {"name": "x"}, "val_loss": None}
# (fsdp, tensor), and how each array is cut where there is a mesh.
SPECS = {
    "blocks.0.up_proj.kernel": PartitionSpec("fsdp", "tensor"),
    "blocks.0.up_proj.bias": PartitionSpec("tensor"),
    "final_norm.scale": PartitionSpec(),
    "head": PartitionSpec(("fsdp", "tensor")),
}


def values(step):
    """The same on every process."""
    random = np.random.default_rng(step)

    def group():
        return {
            "blocks.0.up_proj.kernel": random.standard_normal((16, 24)).astype(np.float32),
            "blocks.0.up_proj.bias": random.standard_normal(8).astype(np.float32),
            "final_norm.scale": random.standard_normal(5).astype(np.float32),
            "head": random.standard_normal((8, 3)).astype("float16"),
        }

    return {"parameters": group(), "mu": group(), "nu": group(), "step": np.int32(step)}


def shardings(fsdp, tensor):
    devices = np.asarray(jax.devices()[: fsdp * tensor]).reshape(fsdp, tensor)
    mesh = Mesh(devices, ("fsdp", "tensor"))

    def one(path, _):
        spec = SPECS.get(path[-1].key, PartitionSpec())
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, values(0))


def place(arrays, layout):
    return jax.tree.map(
        lambda x, s: jax.make_array_from_callback(np.shape(x), s, lambda i: np.asarray(x)[i]),
        arrays,
        shardings(*layout),
    )


def same(found, step, layout):
    """Whether every part that is here is what it should be, where it should be."""
    for x, expected, sharding in zip(
        *map(jax.tree.leaves, (found, values(step), shardings(*layout))), strict=True
    ):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.sharding, sharding)
        assert x.dtype == expected.dtype
        for shard in x.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(expected[shard.index]).tobytes()
    return True


def act(checkpoints, action, step, layout):
    if action in ("save", "fail"):
        checkpoints.save(step, place(values(step), layout), ABOUT)
    if action == "save-numpy":
        checkpoints.save(step, values(step), ABOUT)
    if action.startswith(("save", "fail")):
        manifest = checkpoints.wait()
        if jax.process_index() == 0:
            assert manifest["arrays"] == describe(values(step))
    if action == "restore-numpy":
        assert describe(checkpoints.restore(step)[0]) == describe(values(step))
    if action == "restore":
        arrays, _, warnings = checkpoints.restore_latest(
            quarantine=True, shardings=shardings(*layout)
        )
        same(arrays, step, layout)
        return [*warnings, "fine"]
    return ["fine"]


def break_writing():
    """The arrays of this process cannot be written."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    def full(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device\nmore")

    tensorstore_utils.build_array_write_spec = full


def main(port, index, count, folder, *actions):
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
    checkpoints = CheckpointFolder(Path(folder))
    for action in actions:
        what, step, layout = action.split(":")
        if what == "fail" and index == "1":
            break_writing()
        try:
            result = act(checkpoints, what, int(step), tuple(map(int, layout.split("x"))))
        except JaxformerError as error:
            result = [f"{type(error).__name__}: {error}"]
        print("result", *result, flush=True)
    # No process leaves while another still needs the coordinator.
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
