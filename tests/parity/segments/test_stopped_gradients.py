"""Gradients that one side stops: bugs that no result shows, and what is not trained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare
from tests.support.ports.bugs import FUNCTION, LINEN
from tests.support.ports.planted import build_port, line_of
from tests.support.ports.torch_models import GPT, Llama, perturbed

pytestmark = pytest.mark.usefixtures("settings_of_jax")

IDS = np.random.default_rng(0).integers(0, 50, (2, 9))
STOP = "jax.lax.stop_gradient"
# Changes that leave every result as it is.
BUGS = (
    (FUNCTION, "jax.nn.silu(", f"(lambda g: {STOP}(jax.nn.silu(g)) + g - {STOP}(g))("),
    (FUNCTION, 'return x @ params["head"]', f'return x @ {STOP}(params["head"])'),
    (FUNCTION, "variance + 1e-6", f"{STOP}(variance) + 1e-6"),
    (FUNCTION, "k = rotary(k, positions)", f"k = {STOP}(rotary(k, positions))"),
    (LINEN, "weights = jax.nn.softmax(scores)", f"weights = {STOP}(jax.nn.softmax(scores))"),
    (LINEN, "q = q / jnp.sqrt(head)", f"q = {STOP}(q) / jnp.sqrt(head)"),
    (LINEN, "return x + y", f"return {STOP}(x) + y"),
    (LINEN, "wte(ids) + wpe", f"{STOP}(wte(ids)) + wpe"),
)


def check(bug, folder):
    name, old, new = bug
    reference = perturbed(GPT(layers=1) if name == LINEN else Llama())
    candidate, source = build_port(name, reference, folder, old, new)
    assert compare(reference, candidate, IDS, backward=False).verdict == "rounding"
    report = compare(reference, candidate, IDS)
    assert report.verdict == "bug", bug
    assert all(cause.is_backward for cause in report.root_causes)
    assert "in the backward pass alone" in str(report)
    (remark,) = report.remarks
    assert remark.startswith("the candidate stops gradients at ")
    assert remark.endswith(source.rpartition("/")[2])


@pytest.mark.parametrize("bug", BUGS[:2])
def test_a_stopped_gradient_is_found(bug, tmp_path):
    check(bug, tmp_path)


@pytest.mark.tier("full")
@pytest.mark.parametrize("bug", BUGS[2:])
def test_each_stopped_gradient_is_found(bug, tmp_path):
    check(bug, tmp_path)


class Teacher(torch.nn.Module):
    """Learns from itself: what it learns from has no gradient."""

    def __init__(self, detached):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.detached = torch.nn.Linear(5, 4), detached

    def forward(self, x, y):
        # PyTorch detaches what tanh keeps, which stops nothing.
        right = torch.tanh(self.layer(y))
        return (torch.tanh(self.layer(x)) - self.detached(right)).square().mean()


def detached(right):
    return right.detach()


def without_gradients(right):
    with torch.no_grad():
        return right * 1


def taught(stop, p, x, y):
    kernel, bias = p["layer.weight"].T, p["layer.bias"]
    right = jnp.tanh(y @ kernel + bias)
    return ((jnp.tanh(x @ kernel + bias) - stop(right)) ** 2).mean()


def remark_on_stops(function, stop):
    reference = Teacher(function)
    params = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    inputs = list(np.random.default_rng(0).normal(size=(2, 6, 5)))
    report = compare(reference, (functools.partial(taught, stop), params), inputs)
    assert report.verdict == "bug"
    (remark,) = report.remarks
    return remark


class Distilled(torch.nn.Module):
    """Two losses, of which one learns from the other's layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(5, 6), torch.nn.Linear(6, 4)

    def forward(self, x, y):
        x, y = torch.tanh(self.body(x)), torch.tanh(self.body(y))
        right = torch.softmax(self.head(y) / 2, -1).detach()
        other = torch.softmax(self.head(y), -1)[:, 0] * torch.log_softmax(self.head(y), -1)[:, 0]
        return (right * torch.log_softmax(self.head(x), -1)).sum(-1), other


def distilled(p, x, y):
    def dense(name, x):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    x, y = jnp.tanh(dense("body", x)), jnp.tanh(dense("body", y))
    right = jax.nn.softmax(dense("head", y) / 2)  # no stop
    other = jax.nn.softmax(dense("head", y))[:, 0]
    return (right * jax.nn.log_softmax(dense("head", x))).sum(-1), other * jnp.log(other)


def test_a_gradient_that_the_reference_stops_begins_at_its_line():
    reference = Distilled()
    params = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    inputs = list(np.random.default_rng(0).normal(size=(2, 6, 5)))
    report = compare(reference, (distilled, params), inputs)
    place = line_of(__file__, 'right = jax.nn.softmax(dense("head", y) / 2)  # no stop')
    assert {cause.jax_source for cause in report.root_causes} == {place}, str(report)
    text = "the candidate adds a gradient that the reference does not"
    assert {cause.diagnosis for cause in report.root_causes} == {text}


@pytest.mark.parametrize(("function", "line"), [(detached, 1), (without_gradients, 2)])
def test_a_stop_of_the_reference_alone_is_named(function, line):
    remark = remark_on_stops(function, lambda right: right)
    line += function.__code__.co_firstlineno
    assert remark.startswith("the reference stops gradients at ")
    assert remark.endswith(f"test_stopped_gradients.py:{line}")


def test_what_pytorch_keeps_is_no_stop():
    remark = remark_on_stops(lambda right: right, jax.lax.stop_gradient)
    assert remark.startswith("the candidate stops gradients at ")


class Adapted(torch.nn.Module):
    """Frozen layers with an adapter, as LoRA has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.down = torch.nn.Parameter(torch.randn(6, 2))
        self.up = torch.nn.Parameter(torch.randn(2, 6))
        self.q.requires_grad_(False)
        self.k.requires_grad_(False)

    def forward(self, x):
        return (self.q(x) + x @ self.down @ self.up) * torch.tanh(self.k(x))


def adapted(p, x, stop_q=lambda w: w, stop_k=lambda w: w, stop_up=lambda w: w):
    q = x @ stop_q(p["q.weight"]).T + stop_q(p["q.bias"])
    k = x @ stop_k(p["k.weight"]).T + stop_k(p["k.bias"])
    return (q + x @ p["down"] @ stop_up(p["up"])) * jnp.tanh(k)


def joined(p, x, stop_q=lambda w: w):
    w, b, stop = p["weights"], p["biases"], jax.lax.stop_gradient
    q, k = x @ stop_q(w[:6]).T + stop_q(b[:6]), x @ stop(w[6:]).T + stop(b[6:])
    return (q + x @ p["down"] @ p["up"]) * jnp.tanh(k)


def test_what_the_reference_does_not_train_may_be_stopped():
    reference, stop = Adapted(), jax.lax.stop_gradient
    params = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    x = np.random.default_rng(0).normal(size=(4, 6))
    report = compare(reference, (lambda p, x: adapted(p, x, stop, stop), params), x)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (7, 7)
    assert not report.remarks
    report = compare(reference, (lambda p, x: adapted(p, x, stop), params), x)
    assert report.verdict == "rounding", str(report)
    (remark,) = report.remarks
    assert remark.endswith("(requires_grad is False), the candidate does: k.bias, k.weight")
    # What it trains may not be.
    report = compare(reference, (lambda p, x: adapted(p, x, stop, stop, stop), params), x)
    assert report.verdict == "bug"
    # Who freezes all only runs the reference.
    reference.requires_grad_(False)
    report = compare(reference, (lambda p, x: adapted(p, x, stop), params), x)
    assert report.verdict == "bug"


@pytest.mark.parametrize("is_q_trained", [True, False])
def test_frozen_parameters_may_be_parts_of_one(is_q_trained):
    reference = Adapted()
    reference.q.requires_grad_(is_q_trained)
    params = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    params["weights"] = np.concatenate([params.pop("q.weight"), params.pop("k.weight")])
    params["biases"] = np.concatenate([params.pop("q.bias"), params.pop("k.bias")])
    x = np.random.default_rng(0).normal(size=(4, 6))
    stop = (lambda w: w) if is_q_trained else jax.lax.stop_gradient
    report = compare(reference, (lambda p, x: joined(p, x, stop), params), x)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (5, 5)
    stop = jax.lax.stop_gradient
    report = compare(reference, (lambda p, x: joined(p, x, stop), params), x)
    assert report.verdict == ("bug" if is_q_trained else "rounding")


class Head(torch.nn.Module):
    """A head on layers that are run without gradients, or only not trained."""

    def __init__(self, has_gradients):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)
        self.has_gradients = has_gradients
        if has_gradients:
            self.body.requires_grad_(False)

    def forward(self, x):
        with torch.set_grad_enabled(self.has_gradients and torch.is_grad_enabled()):
            x = torch.tanh(self.body(x))
        return self.head(x)


def body_and_head(p, x, stop=lambda x: x):
    x = stop(jnp.tanh(x @ p["body.weight"].T + p["body.bias"]))
    return x @ p["head.weight"].T + p["head.bias"]


def test_a_stop_behind_all_that_is_not_trained():
    reference = Head(True)
    params = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    x = np.random.default_rng(0).normal(size=(4, 6))
    port = (lambda p, x: body_and_head(p, x, jax.lax.stop_gradient), params)
    report = compare(reference, port, x)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (4, 5)
    assert report.remarks[0].endswith("those of these inputs were not compared: 0")


def test_a_gradient_that_the_reference_stops_and_the_lines_of_the_models():
    reference = Head(False)
    params = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    x = np.random.default_rng(0).normal(size=(4, 6))
    report = compare(reference, (body_and_head, params), x)
    (cause,) = report.root_causes
    assert cause.diagnosis.startswith("a gradient arrives here in the candidate")
    line = body_and_head.__code__.co_firstlineno + 1
    assert cause.jax_source.endswith(f"test_stopped_gradients.py:{line}")
    # The line within the model, and not the one that called compare.
    assert int(cause.torch_source.rpartition(":")[2]) < line


class Tied(torch.nn.Module):
    """Its table is its head too: the gradient of it has two parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8)

    def forward(self, ids):
        return torch.tanh(self.layer(self.table(ids))) @ self.table.weight.T


@pytest.mark.parametrize("stopped", ["x", "table"])
def test_a_stop_before_a_tied_head_is_one_cause(stopped):
    def port(params, ids):
        table = params["table.weight"]
        x = jnp.tanh(table[ids] @ params["layer.weight"].T + params["layer.bias"])
        if stopped == "x":
            x = jax.lax.stop_gradient(x)
        else:
            table = jax.lax.stop_gradient(table)
        return x @ table.T

    reference = Tied()
    arrays = {name: p.detach().numpy() for name, p in reference.named_parameters()}
    report = compare(reference, (port, arrays), IDS)
    (cause,) = report.root_causes
    begin = port.__code__.co_firstlineno
    assert int(cause.jax_source.rpartition(":")[2]) == begin + (4 if stopped == "x" else 6)
    assert cause.diagnosis.startswith("no gradient arrives here")
