"""Times a fresh process from the command to the end of its first training step.

    uv run --group test python benchmarks/start_up.py

``train.py`` is started with an empty compilation cache (cold) and with what the run before left in
it (warm), and is timed until its first line of metrics is written. torch_ref's script imports,
reads the corpus, builds the model and makes one step, eager and under ``torch.compile``, whose own
cache is cold or warm in the same way. Files of the system's page cache stay where they are.
One more process a turn does the same in stages, and shows where the time is spent. On a CPU a
C compiler works from the first import on, and the step is compiled while the model is made, so that
"products" and "compile" are what is left of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measure

STARTED = "JAXFORMER_BENCHMARK_STARTED"
TRAIN, EAGER, COMPILED = "train.py", "torch_ref", "torch_ref compiled"
CACHES = {TRAIN: ("cold", "warm"), EAGER: ("none",), COMPILED: ("cold", "warm")}


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=3)
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--data", default="tiny-shakespeare", help="a corpus or a text file")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        stages = (candidate_stages if arguments.only == TRAIN else torch_stages)(arguments)
        print(json.dumps(stages))
        return

    from jaxformer.data.corpora import load_corpus

    times: dict[tuple[str, str], list[float]] = {}
    stages_of: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # By path, as the user's cache, where a corpus may lie, is another one below.
        arguments.text = Path(folder) / "corpus.txt"
        arguments.text.write_text(load_corpus(arguments.data).text, encoding="utf-8")
        for turn in range(arguments.turns):
            for side, caches in CACHES.items():
                for cache in caches:
                    # The C++ compiler's command line takes no blanks.
                    where = Path(folder) / f"{side}-{turn}".replace(" ", "-")
                    stages = in_stages(side, arguments, where / "stages")
                    seconds = (
                        first_step_of_train(arguments, where / "run")
                        if side == TRAIN
                        else sum(stages.values())
                    )
                    times.setdefault((side, cache), []).append(seconds)
                    stages_of.setdefault((side, cache), []).append(stages)
    results = [
        {
            "side": side,
            "cache": cache,
            "seconds": measure.spread(found),
            "stages": {
                name: measure.rounded(statistics.median(s[name] for s in stages_of[side, cache]))
                for name in stages_of[side, cache][0]
            },
        }
        for (side, cache), found in times.items()
    ]
    del arguments.text
    measure.write("start_up", arguments, results, COLUMNS)


def first_step_of_train(arguments: argparse.Namespace, where: Path) -> float:
    """Returns the seconds until ``train.py`` writes its first metrics; it is ended then."""
    out = Path(tempfile.mkdtemp(dir=_make(where)))
    command = [
        sys.executable, "train.py", "--preset", arguments.preset,
        "--data", str(arguments.text), "--out", str(out / "run"),
    ]  # fmt: skip
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=measure.ROOT, env=_environment(where),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = out / "run" / "metrics.jsonl"
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                assert process.stderr is not None
                sys.exit(f"train.py ended before its first step: {process.stderr.read()}")
            time.sleep(0.005)
        return time.perf_counter() - begin
    finally:
        process.kill()
        process.communicate()


def in_stages(side: str, arguments: argparse.Namespace, where: Path) -> dict[str, float]:
    """Returns the seconds of each stage of a process that makes one step."""
    environment = _environment(_make(where)) | {STARTED: str(time.time())}
    settings = ["--preset", arguments.preset, "--data", str(arguments.text)]
    return measure.child([__file__, *settings, "--only", side], **environment)


def candidate_stages(arguments: argparse.Namespace) -> dict[str, float]:
    """Does what ``train.py`` does up to its first step, and times each stage."""
    stage = _Stages()
    from jaxformer.hardware.memory import without_collection
    from jaxformer.training.presets import PRESETS
    from jaxformer.training.product_conditions import build_what_is_called

    build_what_is_called(PRESETS[arguments.preset]())
    with without_collection(all_stays=True):
        import numpy as np

        import jaxformer.cli.main
        import jaxformer.training.loop  # noqa: F401  (what train.py imports)
        from jaxformer.data.corpora import load_corpus
        from jaxformer.hardware.compilation_cache import use_compilation_cache
        from jaxformer.training.experiment import Experiment
        from jaxformer.training.initial_state import plan_parameters
        from jaxformer.training.parallel import StepSpec, make_strategy
        from jaxformer.training.parallel.devices import choose_devices
        from jaxformer.training.products import choose_products

    stage.done("imports")
    use_compilation_cache()
    experiment = Experiment.prepare(PRESETS[arguments.preset](), load_corpus(arguments.data))
    config = experiment.config
    devices = choose_devices(config)
    stage.done("corpus")
    config, _ = choose_products(config, devices)
    stage.done("products")
    parallel = make_strategy(config, StepSpec.from_config(config), devices)
    if devices[0].platform == "cpu":
        shapes = parallel.spec.state_shapes()
        parallel.compile_ahead(shapes, len(experiment.train_ids), config.steps_per_call)
    state = parallel.initial_state(plan_parameters(config.model, config.seed))
    tokens = parallel.place_tokens(experiment.train_ids)
    stage.done("model")
    starts = np.zeros((config.steps_per_call, config.batch_size), np.int32)
    state, _ = parallel.train(state, tokens, starts, 0)
    stage.done("compile")
    parallel.train(state, tokens, starts, 1)
    stage.done("step")
    return stage.seconds


def torch_stages(arguments: argparse.Namespace) -> dict[str, float]:
    """Does the same with PyTorch, and times each stage."""
    stage = _Stages()
    import dataclasses

    import torch

    from jaxformer.training.presets import PRESETS
    from torch_ref.char_data import CharTokenizer, TokenIdsDataset, batch_at, train_validation_split
    from torch_ref.config import OptimizerConfig, TransformerLMConfig
    from torch_ref.train_step import TrainState, language_model_loss, train_step
    from torch_ref.transformer_lm import TransformerLM

    stage.done("imports")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = PRESETS[arguments.preset]()
    text = Path(arguments.data).read_text(encoding="utf-8")
    tokenizer = CharTokenizer.train_from_text(text)
    ids, _ = train_validation_split(tokenizer.encode(text), config.model.context_length)
    stage.done("corpus")
    settings = config.model.settings()
    settings["vocab_size"] = settings["vocab_size"] or tokenizer.vocabulary_size()
    model = TransformerLM(TransformerLMConfig(**settings)).to(device)
    optimizer = OptimizerConfig(**dataclasses.asdict(config.optimizer))
    state = TrainState.create(model, optimizer)
    dataset = TokenIdsDataset(ids, config.model.context_length)
    windows = batch_at(dataset, config.seed, 0, config.batch_size)
    inputs, targets = (torch.from_numpy(x)[None].long().to(device) for x in windows)
    stage.done("model")
    loss = language_model_loss
    if arguments.only == COMPILED:
        loss = torch.compile(language_model_loss)
        loss(model, inputs[0], targets[0]).backward()
        stage.done("compile")
    _, metrics = train_step(state, (inputs, targets), optimizer=optimizer, loss_function=loss)
    metrics["train_loss"].item()
    stage.done("step")
    return stage.seconds


class _Stages:
    """Returns the seconds of each stage; the first counts from the start of the process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = float(os.environ[STARTED])

    def done(self, name: str) -> None:
        now = time.time()
        self.seconds[name] = now - self.last
        self.last = now


def _make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _environment(folder: Path) -> dict[str, str]:
    """Caches of compiled programs of both frameworks in ``folder``."""
    caches = {"XDG_CACHE_HOME": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return {**os.environ, **caches}


def _stages(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["stages"].items())


COLUMNS = {
    "side": lambda row: row["side"],
    "cache": lambda row: row["cache"],
    "first step after": lambda row: f"{row['seconds']['median']:.1f} s",
    "fastest": lambda row: f"{row['seconds']['min']:.1f} s",
    "slowest": lambda row: f"{row['seconds']['max']:.1f} s",
    "stages, s": _stages,
}

if __name__ == "__main__":
    measure.run(main)
