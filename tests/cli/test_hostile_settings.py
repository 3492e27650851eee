"""Settings that hypothesis draws: each is refused in one line, or is one that can be trained."""

import dataclasses
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxformer.cli.arguments import parse
from jaxformer.cli.train import TrainOptions
from jaxformer.errors import UsageError
from jaxformer.training.config import TrainConfig
from jaxformer.training.presets import PRESETS
from tests.faults.hostile import JSON_SETTINGS, NAMES, SETTINGS, by_file, by_flags, flags_of
from tests.faults.tally import Tally
from tests.faults.workbench import Workbench

LARGEST = (2 - 2**-23) * 2.0**127
OFTEN = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


def check_numbers(values):
    for name, value in values.items():
        if isinstance(value, dict):
            check_numbers(value)
        elif isinstance(value, float):
            assert math.isfinite(value), name
            assert abs(value) <= LARGEST, name
        elif isinstance(value, int):
            assert value < (2**63 if name == "seed" else 2**31), name
            assert value >= 0, name


def test_every_number_is_drawn():
    assert {"d_model", "learning_rate", "clip_norm", "steps", "seed", "rotary_base"} <= set(NAMES)
    assert len(NAMES) > 45


@pytest.mark.tier("full")
@settings(OFTEN, max_examples=30)
@given(SETTINGS)
def test_the_command_lines_parser(given_settings):
    """The same options that the command reads, from its real parser."""
    default = TrainOptions(config=PRESETS["nano"]())
    try:
        options = parse(TrainOptions, "jaxformer train", flags_of(given_settings), default)
    except UsageError as error:
        message = str(error)
    else:
        message = "accepted"
        check_numbers(options.config.to_dict())
    assert message.isprintable()


@pytest.mark.tier("full")
@settings(OFTEN, max_examples=400)
@given(JSON_SETTINGS, st.sampled_from(["nano", "gpt2-small"]))
def test_a_stored_config(given_settings, preset):
    values = PRESETS[preset]().to_dict()
    for part in (values, values["model"], values["optimizer"]):
        part.update({k: v for k, v in given_settings.items() if k in part})
    try:
        config = TrainConfig.from_dict(json.loads(json.dumps(values)))
    except ValueError as error:
        message = str(error)
    else:
        message = "accepted"
        check_numbers(config.to_dict())
        assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert "Error" not in message


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)


@settings(OFTEN, max_examples=100)
@given(
    st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(TrainConfig)]), ANYTHING)
)
def test_json_of_any_form_is_refused_as_a_value(values):
    try:
        TrainConfig.from_dict(values)
    except ValueError:
        return
    pytest.fail("a config without a model")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Workbench(tmp_path_factory.mktemp("hostile"), 0)
    assert bench.call(bench.train(bench.folder / "run", "--steps", 1)).code == 0
    return bench


@settings(OFTEN, max_examples=12)
@given(SETTINGS)
def test_a_new_run(bench, given_settings):
    """As far as the moment before anything of it is allocated."""
    with (tally := Tally("")).injection(str(given_settings)) as check:
        by_flags(bench, given_settings, tally, check)
    assert tally.failures == []


@settings(OFTEN, max_examples=12)
@given(JSON_SETTINGS)
def test_a_resumed_run(bench, given_settings):
    with (tally := Tally("")).injection(str(given_settings)) as check:
        by_file(bench, bench.folder / "run", given_settings, tally, check)
    assert tally.failures == []
