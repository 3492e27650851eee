"""Results are compared whole: integers, names, order, what is not finite and what is missing."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare
from tests.support.ports.planted import line_of

pytestmark = pytest.mark.usefixtures("settings_of_jax")

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


@dataclasses.dataclass
class Output:
    """What JAX does not know as a tree."""

    logits: Any
    other: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KnownOutput:
    other: Any
    logits: Any


class Returning(torch.nn.Module):
    """Returns what a function makes of what a layer makes."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = torch.nn.Linear(4, 3), function

    def forward(self, x):
        return self.function(self.layer(x))


def report_of(right, own, x=X):
    reference = Returning(right)
    arrays = {n: p.detach().numpy() for n, p in reference.named_parameters()}

    def candidate(params, x):
        return own(x @ params["layer.weight"].T + params["layer.bias"])

    return compare(reference, (candidate, arrays), x)


@pytest.mark.parametrize(
    ("right", "own", "diagnosis"),
    [
        (
            lambda y: (y, y.argmax(-1)),
            lambda y: (y, jnp.argmax(y, -1) + 1),
            "3 of the 3 integers of result 1 differ: ",
        ),
        (lambda y: y.argmax(-1), lambda y: jnp.argmin(y, -1), "integers of the result differ: "),
        (lambda y: (y, y > 0), lambda y: (y, y <= 0), "9 of the 9 integers of result 1 differ: "),
        (
            lambda y: (y, y.argmax(-1)),
            lambda y: (y, y > 0, jnp.argmin(y, -1)),
            "integers of result 2 differ: ",
        ),
        (
            lambda y: {"y": y, "ids": y.argmax(-1)},
            lambda y: {"y": y, "ids": jnp.argmin(y, -1), "seen": jnp.argmax(y, -1)},
            "integers of result ids differ: ",
        ),
        (
            lambda y: (y, y.argmax(-1)),
            lambda y: (y, jnp.argmax(y, -1)[:2]),
            "result 1 has the shape (2,), not (3,)",
        ),
        (lambda y: y, lambda y: y[:2], "the result has the shape (2, 3), not (3, 3)"),
        (
            lambda y: {"y": y, "loss": y.square().mean()},
            lambda y: {"y": y, "loss": (y**2).mean(1)},
            "result loss has the shape (3,), not ()",
        ),
        (
            lambda y: {"mean": y, "spread": torch.tanh(y)},
            lambda y: {"mean": jnp.tanh(y), "spread": y},
            "result mean is the reference's result spread",
        ),
        (
            lambda y: {"rows": y, "columns": y.T},
            lambda y: {"rows": y.T, "columns": y},
            "result columns is the reference's result rows",
        ),
        (lambda y: y / 0, lambda y: -y / 0, "the result has "),
        (
            lambda y: torch.tanh(y).exp(),
            lambda y: (y, jnp.exp(2 * jnp.tanh(y))),
            "the number 2 in mul must be 1",
        ),
        (
            lambda y: {"y": 2 * torch.tanh(y)},
            lambda y: {"x": y, "y": jnp.tanh(y)},
            "the reference's value is 2 times this",
        ),
        (
            lambda y: Output(y, torch.tanh(y)),
            lambda y: (jnp.tanh(y), 2 * y),
            "the number 2 in mul must be 1: the reference has no such step",
        ),
        (
            lambda y: torch.fft.rfft(y),
            lambda y: jnp.conj(jnp.fft.rfft(y)),
            "the reference's value is -1 times this",
        ),
        (
            lambda y: (y, torch.fft.rfft(y)),
            lambda y: (y, 3 * jnp.fft.rfft(y)),
            "0.333333 = 1/3 times this",
        ),
    ],
)
def test_a_wrong_result_is_a_bug(right, own, diagnosis):
    report = report_of(right, own)
    assert report.verdict == "bug", str(report)
    assert any(diagnosis in cause.diagnosis for cause in report.root_causes), str(report)
    for cause in report.root_causes:
        assert cause.jax_source.startswith(__file__)
        assert cause.torch_source.startswith(__file__)


@pytest.mark.parametrize(
    ("right", "own"),
    [
        (lambda y: (y, y.argmax(-1)), lambda y: (y, jnp.argmax(y, -1))),
        (lambda y: (y, y > 0), lambda y: (y, y > 0)),
        (lambda y: {"b": y, "a": torch.tanh(y)}, lambda y: {"a": jnp.tanh(y), "b": y}),
        (lambda y: {"rows": y, "columns": y.T}, lambda y: {"rows": y, "columns": y.T}),
        (lambda y: torch.fft.fft(y).real, lambda y: jnp.fft.fft(y).real),
        (lambda y: (y, torch.fft.rfft(y)), lambda y: (y, jnp.fft.rfft(y))),
        (lambda y: torch.fft.rfft(y).conj(), lambda y: jnp.conj(jnp.fft.rfft(y))),
        (
            lambda y: {"y": y, "first": y.argmax(-1), "last": y.argmin(-1)},
            lambda y: {"last": jnp.argmin(y, -1), "y": y, "first": jnp.argmax(y, -1)},
        ),
        (lambda y: (y, y.argmax(-1)), lambda y: (y, y > 0, jnp.argmax(y, -1))[::2]),
        *(
            (lambda y: Output(y, torch.tanh(y)), own)
            for own in (
                lambda y: (y, jnp.tanh(y)),
                lambda y: {"other": jnp.tanh(y), "logits": y},
                lambda y: KnownOutput(jnp.tanh(y), y),
                lambda y: Output(y, jnp.tanh(y)),
            )
        ),
        (
            lambda y: types.SimpleNamespace(mean=y, spread=torch.tanh(y)),
            lambda y: {"mean": y, "spread": jnp.tanh(y)},
        ),
        # What the candidate returns too is found inside of the reference.
        (lambda y: torch.tanh(y).exp(), lambda y: (jnp.exp(jnp.tanh(y)), y)),
        (lambda y: torch.tanh(y).exp(), lambda y: (y, jnp.exp(jnp.tanh(y)))),
        # What the reference returns too is found inside of the candidate.
        (lambda y: (y, y > 0), lambda y: jnp.where(y > 0, y, 0.0) + jnp.where(y > 0, 0.0, y)),
        (lambda y: (torch.tanh(y), y), lambda y: jnp.tanh(y)),
    ],
)
def test_right_results_are_equal(right, own):
    report = report_of(right, own)
    assert report.verdict in ("exact", "rounding"), str(report)
    assert not report.remarks


@pytest.mark.parametrize(
    ("right", "own", "text"),
    [
        (
            lambda y: (y, torch.tanh(y)),
            lambda y: y,
            "result 1 of the reference, of shape (3, 3): the candidate has no such",
        ),
        (
            lambda y: {"y": y, "other": torch.tanh(y)},
            lambda y: {"y": y},
            "result other of the reference, of shape (3, 3): the candidate has no such",
        ),
        (
            lambda y: torch.tanh(y),
            lambda y: (jnp.tanh(y), jnp.cosh(y)),
            "result 1 of shape (3, 3): the reference gives (3, 3), and nothing more",
        ),
        (
            lambda y: (torch.tanh(y), torch.softmax(y, -1)),
            lambda y: (jnp.tanh(y), jnp.stack([y, y])),
            "result 1 of shape (2, 3, 3): the reference gives (3, 3), (3, 3)",
        ),
        (lambda y: y > 0, lambda y: (y > 0, jnp.tanh(y)), "the reference gives no floats"),
        (lambda y: y * torch.nan, lambda y: y * jnp.nan, "the result has no finite number"),
        (
            lambda y: (y, y > 0),
            lambda y: y,
            "result 1 of the reference, truth values of shape (3, 3): the candidate has no such",
        ),
        (
            lambda y: (y, y.argmax(-1)),
            lambda y: (y, jnp.argmax(y, -1), y > 0),
            "result 2 of the candidate, truth values of shape (3, 3): the reference has no such",
        ),
    ],
)
def test_what_cannot_be_compared_is_named(right, own, text):
    report = report_of(right, own)
    assert report.verdict == "incomplete", str(report)
    assert any(text in line for line in report.incomplete), str(report)


@pytest.mark.parametrize(
    ("right", "own", "text"),
    [
        (lambda y: y, lambda y: y.T, "the result has its axes in another order"),
        (lambda y: y, lambda y: y.reshape(-1), "another shape: (9,) for (3, 3)"),
        (
            lambda y: (y, torch.tanh(y)),
            lambda y: (jnp.tanh(y), y),
            "the results are in another order: result 0 of the candidate is result 1 of",
        ),
        (
            lambda y: (y, y.argmax(-1), y.argmin(-1)),
            lambda y: {"x": jnp.argmin(y, -1), "y": jnp.argmax(y, -1), "z": y},
            "the results are in another order: result x of the candidate is result 2 of",
        ),
        (
            lambda y: torch.where(y > 0, y, -torch.inf),
            lambda y: jnp.where(y > 0, y, -1e9),
            "has -1e+09 where the reference has -inf: both count as infinite",
        ),
        (lambda y: torch.log(y), lambda y: jnp.log(y), "the numbers of the result are NaN on both"),
    ],
)
def test_what_a_reader_should_know_is_remarked(right, own, text):
    report = report_of(right, own)
    assert report.verdict in ("exact", "rounding"), str(report)
    assert any(text in remark for remark in report.remarks), str(report)


PLANTED = "probabilities = jax.nn.softmax(x) / 0.7  # planted"


class Upsampled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.up = torch.nn.Linear(3, 3), torch.nn.ConvTranspose2d(3, 2, 4, 2, 1)

    def forward(self, x):
        x = self.layer(x)
        probabilities = torch.softmax(x / 0.7, -1)
        return self.up(probabilities.permute(0, 3, 1, 2)), x


def upsampled(padding, p, x):
    x = x @ p["layer.weight"].T + p["layer.bias"]
    probabilities = jax.nn.softmax(x) / 0.7  # planted
    made = jax.lax.conv_general_dilated(  # the wrong shape
        probabilities.transpose(0, 3, 1, 2), p["up.weight"][:, :, ::-1, ::-1].swapaxes(0, 1),
        (1, 1), (padding, padding), lhs_dilation=(2, 2),
    )  # fmt: skip
    return made + p["up.bias"][:, None, None], x


def test_a_wrong_shape_hides_no_bug_before_it():
    reference = Upsampled()
    arrays = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype(np.float32)
    report = compare(reference, (functools.partial(upsampled, (3, 3)), arrays), x)
    first, second = report.root_causes
    assert first.jax_source == line_of(__file__, PLANTED)
    assert second.diagnosis == "result 0 has the shape (2, 2, 10, 10), not (2, 2, 8, 8)"
    assert second.jax_source == line_of(
        __file__, "made = jax.lax.conv_general_dilated(  # the wrong shape"
    )
    (cause,) = compare(reference, (functools.partial(upsampled, (2, 2)), arrays), x).root_causes
    assert cause.jax_source == line_of(__file__, PLANTED)


def test_parts_with_one_name_are_told_apart():
    def candidate(y, place):
        parts = jnp.split(y, 3, 1)
        return parts[0] * jnp.tanh(parts[place])

    def reference(y):
        parts = y.split(1, 1)
        return parts[0] * torch.tanh(parts[1])

    x = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    assert report_of(reference, lambda y: candidate(y, 1), x).verdict == "rounding"
    (cause,) = report_of(reference, lambda y: candidate(y, 2), x).root_causes
    assert cause.diagnosis == (
        "it equals the split of the model (number 3 of 3); it must be number 2 of them"
    )


def test_random_numbers_are_those_that_the_user_draws():
    drawn = np.asarray(jax.random.normal(jax.random.key(1), (3, 3)))
    right, key = torch.from_numpy(np.array(drawn)), jax.random.key(1)
    report = report_of(lambda y: y + right, lambda y: y + jax.random.normal(key, (3, 3)))
    assert report.verdict == "rounding", str(report)
    other = jax.random.key(2)
    report = report_of(lambda y: y + right, lambda y: y + jax.random.normal(other, (3, 3)))
    assert report.verdict == "bug"


def test_a_reference_in_training_mode_is_named():
    reference = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5)).train()
    arrays = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    candidate = (lambda params, x: x @ params["0.weight"].T + params["0.bias"]), arrays
    (remark,) = compare(reference, candidate, X).remarks
    assert remark.endswith("was compared in evaluation mode: Dropout")
    assert reference.training
    assert not compare(reference.eval(), candidate, X).remarks


@pytest.mark.parametrize(
    ("right", "own"),
    [
        (lambda y: torch.log(y), lambda y: jnp.log(jnp.abs(y))),
        (lambda y: torch.where(y > 0, torch.inf, y), lambda y: jnp.where(y > 0, -jnp.inf, y)),
    ],
)
def test_numbers_that_are_not_finite_are_no_mask(right, own):
    (cause,) = report_of(right, own).root_causes
    assert " not finite alike: at (" in cause.diagnosis or "one step too" in cause.diagnosis
