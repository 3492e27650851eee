"""Ports in three kinds of JAX equal their reference, and bugs in them are named."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxformer.parity import assert_parity, compare
from tests.support.ports.bugs import BUGS, EQUINOX, FUNCTION, GONE, LINEN, MISSING, REDUCTIONS
from tests.support.ports.planted import build_port
from tests.support.ports.torch_models import GPT, Llama, ViT, perturbed
from tests.support.tiers import full_after

pytestmark = pytest.mark.usefixtures("settings_of_jax")

IDS = np.random.default_rng(0).integers(0, 50, (2, 13))
IMAGES = np.random.default_rng(0).normal(size=(2, 3, 12, 8)).astype(np.float32)
# Of every kind one: a function, a number, a mask, an input, a mean.
FEW = (0, 2, 28, 38, 48)


@functools.cache
def reference(name):
    torch.manual_seed(0)
    return perturbed({LINEN: GPT, FUNCTION: Llama, EQUINOX: ViT}[name]())


def inputs_of(name):
    """Returns the inputs of the reference, and of the port."""
    if name != EQUINOX:
        return IDS, IDS
    return IMAGES, IMAGES.transpose(0, 2, 3, 1)


@pytest.mark.parametrize("name", full_after(2, [LINEN, FUNCTION, EQUINOX]))
def test_a_right_port_is_equal(name, tmp_path):
    candidate, _ = build_port(name, reference(name), tmp_path)
    inputs, jax_inputs = inputs_of(name)
    report = assert_parity(reference(name), candidate, inputs, jax_inputs=jax_inputs)
    assert report.verdict == "rounding"
    assert report.error < 1e-13
    reached, called = report.coverage.modules
    # The fused projections of the GPT are split in the port, so their own output is nowhere.
    assert called - reached == (3 if name == LINEN else 0)


def first_cause(bug, folder, backward=False):
    """Returns the first root cause of a bug, and "path:line" of where it was planted."""
    name, old, new = bug
    candidate, source = build_port(name, reference(name), folder, old, new)
    inputs, jax_inputs = inputs_of(name)
    report = compare(reference(name), candidate, inputs, jax_inputs=jax_inputs, backward=backward)
    assert report.verdict == "bug", bug
    # A wrong gradient that a wrong result explains is no cause of its own.
    assert not any(cause.is_backward for cause in report.root_causes)
    first = report.root_causes[0]
    assert first.torch_source.rpartition(":")[0].endswith("torch_models.py")
    # A path of modules, without the names that JAX gives to its transformations.
    assert "(" not in first.jax_module
    assert len(str(report).splitlines()) < 80
    return first, source


def check(bug, folder, backward=False):
    """Returns whether the first root cause has the planted line, and whether it has a diagnosis."""
    first, source = first_cause(bug, folder, backward)
    return first.jax_source == source, bool(first.diagnosis)


def check_missing(bug, after, at, folder):
    """Asserts that the lines before and after a missing step are named."""
    first, source = first_cause(bug, folder)
    path = source.rpartition(":")[0]
    lines = Path(path).read_text().splitlines()
    for text, found in ((after, first.jax_after), (at, first.jax_source)):
        (number,) = (i for i, line in enumerate(lines, 1) if text in line)
        assert found == f"{path}:{number}", (text, found)


@pytest.mark.parametrize("number", FEW)
def test_a_planted_bug_is_found(number, tmp_path):
    has_line, has_diagnosis = check(BUGS[number], tmp_path, backward=number < 20)
    assert has_diagnosis
    assert has_line


def counted(bugs, folder):
    """Returns of how many bugs the line is right, and how many have a diagnosis; all are found."""
    return np.array([check(bug, folder) for bug in bugs]).sum(0)


@pytest.mark.tier("full")
def test_every_fourth_planted_bug_is_found_and_most_are_named(tmp_path):
    has_line, has_diagnosis = counted(BUGS[::4], tmp_path)
    # The other line has no equation left: see GONE.
    assert has_line >= 14
    assert has_diagnosis == len(BUGS[::4]) == 15


@pytest.mark.tier("slow")
def test_all_planted_bugs_are_found_and_most_are_named(tmp_path):
    assert len(BUGS) == 60
    has_line, has_diagnosis = counted(BUGS, tmp_path)
    # The other three lines have no equation left: see GONE.
    assert has_line >= 57
    assert has_diagnosis >= 59


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.tier("full"))])
def test_a_missing_step_is_found_between_two_lines(number, tmp_path):
    if number:
        for place, lines in GONE.items():
            check_missing(BUGS[place], *lines, tmp_path)
    # Masks of -1e9 once hid the missing scale: so large a number was taken for one in float32.
    for *bug, after, at in MISSING[1:] if number else MISSING[:1]:
        check_missing(bug, after, at, tmp_path)


@pytest.mark.tier("full")
def test_means_of_other_numbers_are_named(tmp_path):
    assert all(check(bug, tmp_path) == (True, True) for bug in REDUCTIONS)


def test_a_report_says_what_and_where(tmp_path):
    candidate, source = build_port(
        LINEN, reference(LINEN), tmp_path, "approximate=False", "approximate=True"
    )
    text = str(compare(reference(LINEN), candidate, IDS))
    assert "computes the tanh form of GELU; the reference computes the erf GELU" in text
    assert source.rpartition("/")[2] in text
    with pytest.raises(AssertionError, match="tanh form of GELU"):
        assert_parity(reference(LINEN), candidate, [IDS])


def test_a_wrong_row_that_no_input_reads_is_found(tmp_path):
    function, params = build_port(FUNCTION, reference(FUNCTION), tmp_path)[0]
    embed = params["embed"].copy()
    embed[52] += 1
    report = compare(reference(FUNCTION), (function, {**params, "embed": embed}), IDS)
    assert report.verdict == "bug"
    assert not report.root_causes
    assert report.weights == ("embed is not embed.weight: equal but for entries 52 of axis 0",)


class LastPosition(GPT):
    """Gives the logits of the last token alone, as nanoGPT does where there are no targets."""

    def forward(self, ids):
        return super().forward(ids)[:, [-1]]


def test_a_reference_that_gives_the_last_position_alone(tmp_path):
    model = perturbed(LastPosition())
    report = compare(model, build_port(LINEN, model, tmp_path)[0], IDS)
    assert report.verdict == "rounding"
    assert report.remarks == ("the reference gives only the last entry: (2, 1, 61) of (2, 13, 61)",)
    wrong = build_port(LINEN, model, tmp_path, "return wte.attend(x)", "return 2 * wte.attend(x)")
    report = compare(model, wrong[0], IDS)
    assert report.verdict == "bug"
    assert "2 in mul must be 1" in report.root_causes[0].diagnosis
