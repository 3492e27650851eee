"""A trace of some steps is written and reported, and does not change the run."""

import gzip
import json
from pathlib import Path

import jax
import pytest

from tests.support.tiny import DROPOUT, losses, same_run, train


@pytest.mark.tier("full")
def test_a_profile_traces_the_steps_asked_for(whole, whole_text, capsys):
    assert train(whole_text, "run", "--steps", 30, "--profile", 9, *DROPOUT) == 0
    same_run("run", whole)
    out = capsys.readouterr().out
    (trace,) = Path("run/profile").rglob("*.trace.json.gz")
    (line,) = [line for line in out.splitlines() if line.startswith("profile of steps ")]
    assert str(trace) in line
    assert "ui.perfetto.dev" in line
    # The first call makes one step, the second as many as fit before the evaluation at 10.
    first, last = (int(word.rstrip(":")) for word in line.split()[3:6:2])
    assert first > 2
    assert last - first + 1 == 9
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    traced = [event["args"]["step_num"] for event in events if event.get("name") == "train"]
    assert traced, "the calls are marked with their steps"
    assert min(map(int, traced)) == first
    assert max(map(int, traced)) <= last


@pytest.mark.tier("full")
def test_a_run_too_short_to_profile_says_so(text, capsys):
    assert train(text, "run", "--steps", 1, "--profile", 3) == 0
    assert "no profile: the run ended before its warm-up did" in capsys.readouterr().out
    assert not Path("run/profile").exists()


def test_a_profiler_that_fails_is_reported_once_and_training_continues(text, capsys, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    assert train(text, "run", "--steps", 20, "--profile", 3) == 0
    assert capsys.readouterr().out.count("no profile (no CUPTI); training continues") == 1
    assert len(losses("run")) == 20
