"""``jaxformer train``: from arguments to a run. JAX is imported only once the arguments stand."""

import contextlib
import dataclasses
import os
import signal
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxformer.cli.arguments import parse, peek, preset_name, run_folder
from jaxformer.cli.train_options import ProcessOptions, TrainOptions
from jaxformer.errors import UsageError
from jaxformer.training.presets import PRESETS

PROCESS_FLAGS = {"--coordinator", "--num-processes", "--process-id", "--distributed"}


def train(arguments: Sequence[str]) -> None:
    """Trains as the arguments say, or goes on with a run.

    Raises:
        JaxformerError: what is given cannot be trained.
    """
    with _interrupted_at_once():
        _train(arguments)


@contextlib.contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """SIGINT ends the process with one line, until training says otherwise.

    A KeyboardInterrupt that comes while a module is imported can be lost there, and the run would
    then begin.
    """

    def stop(_number: int, _frame: types.FrameType | None) -> None:
        os.write(2, b"jaxformer: stopped\n")
        os._exit(130)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _train(arguments: Sequence[str]) -> None:
    from jaxformer.distributed import processes

    names = {argument.partition("=")[0] for argument in arguments}
    if names & PROCESS_FLAGS and not names & {"-h", "--help"}:
        # JAX has to know of the other processes before anything asks it for devices.
        alone = parse(ProcessOptions, "jaxformer train", arguments, others=True)
        processes.initialize(alone, debug="--debug" in arguments)
    if processes.count() > 1:
        from jaxformer.training.run_folder import check_shared

        check_shared(run_folder(arguments))
    options, out, experiment = processes.all_or_raise(lambda: _prepare(arguments))

    from jaxformer.training import loop

    loop.train(
        experiment,
        out,
        resume=options.resume,
        cast=options.cast,
        trackers=options.tracker,
        profile_steps=options.profile,
    )


def _prepare(arguments: Sequence[str]) -> tuple[TrainOptions, Path, Any]:
    """The options, the run's folder and the ``Experiment`` that the arguments make."""
    preset, out = preset_name(arguments), run_folder(arguments)
    resume = "--resume" in arguments
    source = peek(arguments, "--init-from")
    start = tokenizer = None
    if resume and source is not None:
        raise UsageError("--resume goes on with the run that is there: leave out --init-from")
    if resume:
        from jaxformer.training.run_folder import (
            check_settings,
            stored_config,
            stored_vocabulary,
        )

        config = before = stored_config(out)
    else:
        config = PRESETS[preset]()
    if source is not None:
        from jaxformer.porting.starts import read_start
        from jaxformer.training.experiment import Start

        start = Start(**read_start(Path(source), fresh="--fresh-optimizer" in arguments))
        config = dataclasses.replace(config, model=start.model)
    default = TrainOptions(config=config)
    options: TrainOptions = parse(TrainOptions, "jaxformer train", arguments, default)
    config = options.config
    if resume:
        check_settings(before.to_dict(), config)
        started, vocabulary = stored_vocabulary(out)
        if started:
            from jaxformer.data.tokenizers import tokenizer_in

            tokenizer = tokenizer_in(out, vocabulary)

    from jaxformer.data.corpora import load_corpus

    corpus = load_corpus(config.data, encoding=config.encoding, download=options.download)

    from jaxformer.hardware.compilation_cache import use_compilation_cache
    from jaxformer.training.experiment import Experiment

    use_compilation_cache(options.compilation_cache)
    return options, out, Experiment.prepare(config, corpus, start=start, tokenizer=tokenizer)
