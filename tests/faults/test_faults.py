"""The fault suite, a few of each; ``python -m tests.faults`` is all of it."""

import json

import pytest

from tests.faults import soak, table
from tests.faults.__main__ import COLUMNS, FAULTS, main, run
from tests.faults.tally import Tally
from tests.faults.workbench import Workbench
from tests.support.tiers import full_after

# How many of each, in the full tier: of those that need a process for each injection one or two do.
# Of these the default tier makes one each.
FIRST = ("kill -9, one process", "flipped bits")
FEW = {
    "kill -9, one process": 3,
    "SIGTERM and SIGINT": 2,
    "flipped bits": 5,
    "truncated files": 3,
    "missing files": 3,
    "full disk": 2,
    "two runs in one folder": 3,
    "clock set back": 1,
    "stray folders": 2,
    "another number of devices": 2,
    "numbers that are not finite": 2,
    "metrics services": 2,
    "damaged metrics.jsonl": 4,
    "malicious files": 25,
    "commands that fail": 40,
}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 1) for name in FIRST),
        *full_after(0, FEW.items()),
    ],
)
def test_a_few_of_each(name, count, bench):
    tally = run(name, bench, count)
    assert tally.failures == []
    assert tally.skipped or tally.injected == tally.held >= 1
    assert (tally.durable_lost, tally.unreadable, tally.files_changed) == (0, 0, 0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    # Few of the few get so far; the soak has all the steps.
    bench = Workbench(tmp_path_factory.mktemp("faults"), 1, reference_steps=150)
    yield bench
    bench.close()


def test_a_fault_that_does_not_hold_is_told(capsys, tmp_path, monkeypatch):
    def inject(bench, tally, count):
        for number in range(count):
            with tally.injection(f"fault {number}") as check:
                check.that(number != 1, "something was lost")

    monkeypatch.setitem(FAULTS, "flipped bits", (inject, 3))
    out = tmp_path / "out.json"
    arguments = ["--only", "flipped bits", "--folder", str(tmp_path / "work"), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["faults", *arguments])
    assert main() == 1
    (row,) = json.loads(out.read_text())["results"]
    assert (row["injected"], row["held"]) == (3, 2)
    assert row["failures"] == ["fault 1: something was lost"]
    captured = capsys.readouterr()
    assert "fault 1: something was lost" in captured.err
    assert COLUMNS["held"].split()[0] in captured.out


def test_memory_and_files_that_grow_are_not_flat():
    def samples(memory, files):
        return [
            {
                "seconds": float(i),
                "memory": 1e9 + memory * i + 1e5 * (i % 3),
                "files": 20 + files(i),
            }
            for i in range(100)
        ]

    found = soak.flatness(samples(0, lambda i: 0))
    assert found["flat_memory"]
    assert found["flat_files"]
    # One per cent of a gigabyte over the fifty seconds of the second half is 200 kB a second.
    assert not soak.flatness(samples(300_000, lambda i: 0))["flat_memory"]
    assert not soak.flatness(samples(0, lambda i: i // 60))["flat_files"]


def test_documents_say_what_the_results_do():
    for path in table.TARGETS:
        text = path.read_text(encoding="utf-8")
        assert table.render(text, table.load()) == text, f"{path.name}: run tests.faults.table"


@pytest.mark.skipif("faults" not in table.load(), reason="the suite was not run yet")
def test_the_result_is_of_the_complete_suite_and_all_held():
    found = {row["fault"]: row for row in table.load()["faults"]["results"]}
    assert found.keys() == FAULTS.keys()
    for name, row in found.items():
        assert (row["held"], row["failures"]) == (row["injected"], []), name
        assert (row["durable_lost"], row["unreadable"], row["files_changed"]) == (0, 0, 0), name
    assert found["kill -9, one process"]["injected"] >= 50
    assert found["kill -9, two processes"]["injected"] >= 50
    assert found["flipped bits"]["injected"] >= 200


@pytest.mark.skipif("soak" not in table.load(), reason="the soak was not run yet")
def test_the_soak_is_the_run_that_was_left_alone():
    (soaked,) = table.load()["soak"]["results"]
    assert soaked["steps"] == 20_000
    assert len(soaked["kills"]) == 10
    good = ("same_losses", "same_state", "flat_memory", "flat_files")
    assert [name for name in good if not soaked[name]] == []


def test_a_figure_that_is_not_a_results_is_found():
    text = "<!-- faults: suite -->\n0 lost\n<!-- end of suite -->\n"
    assert "0 lost" not in table.render(text, {})
    with pytest.raises(SystemExit, match="not closed"):
        table.render(text.replace("end of", "end"), {})


@pytest.mark.tier("slow")
def test_a_short_soak(tmp_path):
    found = soak.soak(Workbench(tmp_path, 0), steps=600, kills=3)
    assert found["same_losses"]
    assert found["same_state"]
    assert found["unreadable"] == 0
    assert len(found["kills"]) == 3


@pytest.mark.tier("slow")
@pytest.mark.parametrize("name", FAULTS)
def test_all_of_each(name, tmp_path):
    bench = Workbench(tmp_path, 2)
    assert run(name, bench).failures == []
    bench.close()


def test_a_tally_counts():
    tally = Tally("x")
    for good in (True, False):
        with tally.injection("it") as check:
            check.that(good, "seen")
    assert (tally.injected, tally.held, tally.failures) == (2, 1, ["it: seen"])
