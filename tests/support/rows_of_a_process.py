"""``python -m tests.support.rows_of_a_process train …`` writes which rows a process would train on.

The file ``rows-N.npz`` in the run's folder has, for each call, the rows of process N, where they
are in the batches, and which of them this process was asked for.
"""

import sys

import numpy as np

from jaxformer.cli.main import main
from jaxformer.distributed import processes
from jaxformer.training import loop
from jaxformer.training.batches import make_batches
from jaxformer.training.parallel import StepSpec, make_strategy
from jaxformer.training.parallel.devices import choose_devices

# The first step and the number of steps: two that follow each other, and one of a resumed run.
CALLS = ((0, 3), (3, 2), (7, 3))
# Below all ids, and below the target that does not count.
NOT_READ = -1000


def write_rows(experiment, out, **_):
    config = experiment.config
    strategy = make_strategy(config, StepSpec.from_config(config), choose_devices(config))
    batches = make_batches(experiment, strategy)
    found = {}
    for number, call in enumerate(CALLS):
        _, placed = batches.take(*call)
        rows = np.full(placed.shape, NOT_READ, np.int32)
        for shard in placed.addressable_shards:
            rows[shard.index] = shard.data
        found[f"call{number}"] = rows.reshape(len(rows), config.batch_size, -1)
    batches.close()
    out.mkdir(parents=True, exist_ok=True)
    np.savez(out / f"rows-{processes.index()}.npz", **found)


if __name__ == "__main__":
    loop.train = write_rows
    sys.exit(main(sys.argv[1:]))
