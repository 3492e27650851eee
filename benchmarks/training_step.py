"""Times one optimizer step of jaxformer and of torch_ref in turn, in one process.

    uv run --group test python benchmarks/training_step.py --preset nano

Both sides take the same windows of the same random tokens, from the same weights; each turn is
one call of jaxformer's compiled loop and as many steps of torch_ref. The ratio is of medians.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time


def main() -> None:
    """Prints the medians and their ratio as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--batch-size", type=int, help="default the preset's")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile")
    arguments = parser.parse_args()

    import jax
    import numpy as np
    import torch

    import torch_ref.config
    import torch_ref.train_step
    import torch_ref.transformer_lm
    from jaxformer.char_data import TokenIdsDataset, batch_at, window_starts
    from jaxformer.porting import export_arrays
    from jaxformer.train_step import TrainState
    from jaxformer.training.config import PRESETS
    from jaxformer.training.loop import make_parameters, uses_dropout
    from jaxformer.training.strategies import DataParallel

    config = PRESETS[arguments.preset]()
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 65)
    batch_size = arguments.batch_size or config.batch_size
    optimizer = dataclasses.replace(config.optimizer, decay_steps=config.steps)
    ids = np.random.default_rng(0).integers(0, 65, 200_000).astype(np.int32)
    dataset = TokenIdsDataset(ids, model.context_length)
    torch.set_num_threads(os.cpu_count() or 1)

    definition, parameters = make_parameters(model, 0)
    parallel = DataParallel(
        definition,
        optimizer,
        seed=0,
        batch_size=batch_size,
        context_length=model.context_length,
        uses_dropout=uses_dropout(model),
    )
    twin = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**dataclasses.asdict(model))
    )
    arrays = export_arrays(parameters)
    twin.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in arrays.items()})
    torch_optimizer = torch_ref.config.OptimizerConfig(**dataclasses.asdict(optimizer))
    sides: dict[str, list[float]] = {"jaxformer": [], "torch_ref": []}
    torch_states = {"torch_ref": torch_ref.train_step.TrainState.create(twin, torch_optimizer)}
    if arguments.compile:
        compiled = torch_ref.transformer_lm.TransformerLM(twin.config)
        compiled.load_state_dict(twin.state_dict())
        compiled.compile()
        torch_states["torch_ref compiled"] = torch_ref.train_step.TrainState.create(
            compiled, torch_optimizer
        )
        sides["torch_ref compiled"] = []

    state = parallel.replicate(TrainState.create(parameters, optimizer))
    tokens = parallel.replicate(ids)
    losses = {}
    for turn in range(arguments.turns + 1):
        first = turn * arguments.steps
        starts = np.stack(
            [window_starts(0, first + i, batch_size, len(dataset)) for i in range(arguments.steps)]
        )
        begin = time.perf_counter()
        state, history = parallel.train(state, tokens, starts, arguments.steps)
        sides["jaxformer"].append((time.perf_counter() - begin) / arguments.steps)
        losses["jaxformer"] = float(history["train_loss"][-1])
        batches = [batch_at(dataset, 0, first + i, batch_size) for i in range(arguments.steps)]
        for name, torch_state in torch_states.items():
            begin = time.perf_counter()
            for inputs, targets in batches:
                _, metrics = torch_ref.train_step.train_step(
                    torch_state,
                    (torch.from_numpy(inputs)[None].long(), torch.from_numpy(targets)[None].long()),
                    optimizer=torch_optimizer,
                )
                loss = metrics["train_loss"].item()
            sides[name].append((time.perf_counter() - begin) / arguments.steps)
            losses[name] = loss

    # The first turn compiles.
    medians = {name: statistics.median(times[1:]) for name, times in sides.items()}
    result = {
        "preset": arguments.preset,
        "batch_size": batch_size,
        "step_ms": {name: round(1000 * value, 3) for name, value in medians.items()},
        "spread_ms": {
            name: [round(1000 * min(times[1:]), 3), round(1000 * max(times[1:]), 3)]
            for name, times in sides.items()
        },
        "jaxformer_over": {
            name: round(medians["jaxformer"] / value, 3)
            for name, value in medians.items()
            if name != "jaxformer"
        },
        "final_loss": losses,
        "turns": arguments.turns,
        "steps_per_turn": arguments.steps,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(), "jax": jax.__version__, "torch": torch.__version__
        },
    }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
