"""Hostile settings, drawn by hypothesis: nan, inf, negatives, absurd sizes, in every number."""

import contextlib
import dataclasses
import functools
import json
import math
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.config_tree import setting_types
from jaxformer.errors import JaxformerError
from jaxformer.training.config import TrainConfig
from tests.faults.tally import Check, Tally
from tests.faults.workbench import Workbench, unchanged

ACCEPTED = 99
SECONDS = 20
TYPES = {
    **setting_types(TransformerLMConfig),
    **setting_types(OptimizerConfig),
    **{field.name: typing.get_type_hints(TrainConfig)[field.name]
       for field in dataclasses.fields(TrainConfig)},
}  # fmt: skip
NAMES = sorted(
    name for name, hint in TYPES.items() if {int, float} & {hint, *typing.get_args(hint)}
)
WILD = st.one_of(
    st.sampled_from(
        [
            math.nan, math.inf, -math.inf, 0, -1, 1, 2, 3, 0.5, -0.0, 1e308, 1e-320, 3.5e38,
            2**24, 2**31 - 1, 2**31, 2**32, 2**63, 2**63 - 1, 10**30, 1 - 1e-12,
        ]
    ),
    st.integers(-(2**70), 2**70),
    st.integers(10**5, 2**31 - 1),
    st.floats(),
)  # fmt: skip
SETTINGS = st.dictionaries(st.sampled_from(NAMES), WILD, min_size=1, max_size=4)
NOT_NUMBERS = st.sampled_from(["x", "4", "", None, True, [], [4], {}, {"a": 1}, "9" * 400])
JSON_SETTINGS = st.dictionaries(st.sampled_from(NAMES), WILD | NOT_NUMBERS, min_size=1, max_size=4)


class _AcceptedError(JaxformerError):
    exit_code = ACCEPTED


@contextlib.contextmanager
def stopped_before_training() -> Iterator[None]:
    """Runs end where they would begin to allocate, with exit code ACCEPTED."""
    from jaxformer.training import loop

    def folder(*_: Any, **__: Any) -> Any:
        raise _AcceptedError("this would be trained")

    before = loop.RunFolder
    loop.RunFolder = folder  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        loop.RunFolder = before  # type: ignore[misc]


def flags_of(settings: dict[str, Any]) -> list[str]:
    """Settings as the command line has them."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def by_flags(bench: Workbench, settings: dict[str, Any], tally: Tally, check: Check) -> None:
    """A new run of these settings, given as flags."""
    out = bench.folder / "never"
    _try(bench, ["train", "--data", bench.text, "--out", out, *flags_of(settings)], check)
    tally.files_changed += out.exists()
    check.that(not out.exists(), "a folder was made")


def by_file(
    bench: Workbench, run: Path, settings: dict[str, Any], tally: Tally, check: Check
) -> None:
    """A resumed run whose config.json has these settings."""
    path = run / "config.json"
    good = path.read_text()
    values = json.loads(good)
    for name, value in settings.items():
        for part in (values, values["model"], values["optimizer"]):
            if name in part:
                part[name] = value
    path.write_text(json.dumps(values))
    with unchanged(run, tally, check):
        _try(bench, ["train", "--out", run, "--resume"], check)
    path.write_text(good)


def _try(bench: Workbench, arguments: list[Any], check: Check) -> None:
    began = time.monotonic()
    with stopped_before_training():
        done = bench.call(arguments)
    seconds = time.monotonic() - began
    check.that(seconds < SECONDS, f"took {seconds:.0f} s")
    check.that(done.is_rejected(2, 3, 4, 9, ACCEPTED), done.summary)


def hostile_settings(bench: Workbench, tally: Tally, count: int) -> None:
    """Through the command line's parser, and through the config.json of a run that is resumed."""
    run = bench.folder / "hostile"
    done = bench.call(bench.train(run, "--steps", 1))
    assert done.code == 0, done.summary
    for strategy, inject in (
        (SETTINGS, functools.partial(by_flags, bench)),
        (JSON_SETTINGS, functools.partial(by_file, bench, run)),
    ):
        _inject_all(strategy, inject, tally, bench.seed, max(1, count // 2))


def _inject_all(
    strategy: Any, inject: Callable[..., None], tally: Tally, seed: int, count: int
) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(settings=strategy)
    def each(settings: dict[str, Any]) -> None:
        with tally.injection(f"{settings}") as check:
            inject(settings, tally, check)

    each()
