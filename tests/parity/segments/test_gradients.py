"""Gradients of any candidate are compared with the reference's, whichever array each is of."""

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


@pytest.mark.parametrize(("name", "model"), [(LINEN, GPT), (FUNCTION, Llama)])
def test_every_gradient_of_a_right_port_is_compared(name, model, tmp_path):
    reference = perturbed(model(layers=2))
    candidate, _ = build_port(name, reference, tmp_path)
    report = compare(reference, candidate, IDS)
    assert report.verdict == "rounding", str(report)
    compared, expected = report.coverage.gradients
    assert compared == expected == report.coverage.parameters[1]
    assert f"{compared} of {expected} gradients" in str(report)
    assert not report.remarks
    assert compare(reference, candidate, IDS, backward=False).coverage.gradients == (0, 0)


RULE = "lambda kept, g: (g @ kept[1].T, 2 * kept[0].T @ g),  # planted"


def test_a_wrong_rule_for_a_gradient_is_found():
    linear = torch.nn.Linear(5, 7).double()

    @jax.custom_vjp
    def product(x, kernel):
        return x @ kernel

    product.defvjp(
        lambda x, kernel: (x @ kernel, (x, kernel)),
        lambda kept, g: (g @ kept[1].T, 2 * kept[0].T @ g),  # planted
    )
    params = {"kernel": linear.weight.detach().numpy().T, "bias": linear.bias.detach().numpy()}
    x = np.random.default_rng(0).normal(size=(3, 5))
    report = compare(linear, (lambda p, x: product(x, p["kernel"]) + p["bias"], params), x)
    (cause,) = report.root_causes
    assert cause.is_backward
    assert "0.5 times" in cause.diagnosis
    (remark,) = report.remarks
    assert remark.startswith("the candidate has rules for gradients at ")
    assert remark.endswith(line_of(__file__, RULE).rpartition("/")[2])


class Shared(torch.nn.Module):
    """One matrix that is used twice, and two norms with the same numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = torch.nn.Parameter(torch.randn(6, 6))
        self.first, self.second = torch.ones(2, 6).unbind()
        self.first, self.second = torch.nn.Parameter(self.first), torch.nn.Parameter(self.second)

    def forward(self, x):
        x = torch.tanh(x @ self.matrix) * self.first
        return torch.tanh(x @ self.matrix) * self.second


def test_copies_of_a_shared_parameter_and_equal_parameters_are_told_apart():
    reference = Shared()
    matrix = reference.matrix.detach().numpy()
    params = {"a": matrix, "b": matrix.copy(), "s": np.ones(6), "t": np.ones(6)}

    def port(p, x):
        x = jnp.tanh(x @ p["a"]) * p["s"]
        return jnp.tanh(x @ p["b"]) * p["t"]

    x = np.random.default_rng(0).normal(size=(5, 6))
    report = compare(reference, (port, params), x)
    assert report.verdict == "rounding", str(report)
    # The two copies count as one, and so does the input.
    assert report.coverage.gradients == (4, 4)

    def wrong(p, x):
        x = jnp.tanh(x @ jax.lax.stop_gradient(p["a"])) * p["s"]
        return jnp.tanh(x @ p["b"]) * p["t"]

    report = compare(reference, (wrong, params), x)
    assert report.verdict == "bug"
    assert "has no effect" not in str(report)


class ReturnsTwice(torch.nn.Module):
    """Returns one tensor in two places, as encoder-decoders do with what the encoder made."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 7)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return y, y


def test_a_tensor_that_is_returned_twice_has_one_gradient():
    reference = perturbed(ReturnsTwice())
    params = {n: p.detach().numpy() for n, p in reference.named_parameters()}

    def function(params, x):
        y = jnp.tanh(x @ params["linear.weight"].T + params["linear.bias"])
        return y, y

    x = np.random.default_rng(0).normal(size=(3, 5))
    report = compare(reference, (function, params), x)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (3, 3)


class ReturnsTwo(ReturnsTwice):
    def forward(self, x):
        y, _ = super().forward(x)
        return y, -y


@pytest.mark.parametrize("signs", [(1, -1), (1, 1), (-1, -1), (-1, 1)])
def test_each_result_is_one_of_the_reference(signs):
    """They may stand in another order, but none stands for two."""
    reference = perturbed(ReturnsTwo())
    params = {n: p.detach().numpy() for n, p in reference.named_parameters()}

    def function(params, x):
        y = jnp.tanh(x @ params["linear.weight"].T + params["linear.bias"])
        return [sign * y for sign in signs]

    x = np.random.default_rng(0).normal(size=(3, 5))
    report = compare(reference, (function, params), x)
    assert report.verdict == ("bug" if len(set(signs)) == 1 else "rounding"), str(report)


def test_a_parameter_of_its_own_and_an_input_named_as_a_parameter():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.arange(1.0, 6.0))

        def forward(self, x, scale):
            return x * self.scale * scale

    def port(p, x, scale):
        # The logarithm of the reference's parameter is like none of it.
        return x * jnp.exp(p["log_scale"]) * scale

    inputs = {name: np.random.default_rng(0).normal(size=(3, 5)) for name in ("x", "scale")}
    report = compare(Scaled(), (port, {"log_scale": np.log(np.arange(1.0, 6.0))}), inputs)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (2, 3)
    assert "1 gradient was not compared" in report.remarks[0]
    assert "log_scale" in report.remarks[0]


class Turned(torch.nn.Module):
    """Turns pairs of numbers as complex ones; their gradients are conjugates."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 6)

    def forward(self, x):
        pairs = torch.view_as_complex(self.linear(x).unflatten(-1, (3, 2)))
        angles = torch.arange(1.0, 4.0)
        return torch.view_as_real(pairs * torch.polar(torch.ones(3), angles)).flatten(-2)


def test_gradients_through_complex_numbers_are_compared():
    reference = perturbed(Turned())
    params = {n: p.detach().numpy() for n, p in reference.named_parameters()}

    def port(p, x):
        y = (x @ p["linear.weight"].T + p["linear.bias"]).reshape(-1, 3, 2)
        cos, sin = jnp.cos(jnp.arange(1.0, 4.0)), jnp.sin(jnp.arange(1.0, 4.0))
        one, two = y[..., 0] * cos - y[..., 1] * sin, y[..., 0] * sin + y[..., 1] * cos
        return jnp.stack([one, two], -1).reshape(-1, 6)

    report = compare(reference, (port, params), np.random.default_rng(0).normal(size=(4, 5)))
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (3, 3)


class Buffered(torch.nn.Module):
    """Has numbers in buffers that a port may have as parameters, and the other way round."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 7)
        self.register_buffer("scale", torch.linspace(1, 2, 7))
        self.shift = torch.nn.Parameter(torch.linspace(0, 1, 7))

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.scale + self.shift


def test_a_parameter_that_is_a_buffer_of_the_other_side_has_a_gradient():
    reference = perturbed(Buffered())
    params = {n: a.detach().numpy() for n, a in reference.state_dict().items()}
    shift = params.pop("shift")

    def port(p, x, scale=None):
        scale = p["scale"] if scale is None else scale
        return jnp.tanh(x @ p["linear.weight"].T + p["linear.bias"]) * scale + shift

    def stopped(p, x):
        return port(p, x, jax.lax.stop_gradient(p["scale"]))

    x = np.random.default_rng(0).normal(size=(3, 5))
    report = compare(reference, (port, params), x)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (4, 4)
    (remark,) = report.remarks
    assert remark.startswith("the candidate has no gradient for 1 parameter of the reference")
    assert remark.endswith("shift")
    # The reference does not train it either.
    report = compare(reference, (stopped, params), x)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (4, 4)
    doubled = (lambda p, x: port(p, x, 2 * p["scale"] - jax.lax.stop_gradient(p["scale"])), params)
    report = compare(reference, doubled, x)
    assert report.verdict == "bug"
    assert report.root_causes[0].is_backward


def test_the_statistics_of_a_batch_norm_have_no_gradients():
    reference = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    reference[1].running_mean.uniform_(-1, 1)
    params = {
        n: a.detach().numpy() for n, a in reference.state_dict().items() if a.is_floating_point()
    }

    def port(p, x):
        x = (x @ p["0.weight"].T + p["0.bias"] - p["1.running_mean"]) * p["1.weight"]
        return x / jnp.sqrt(p["1.running_var"] + 1e-5) + p["1.bias"]

    report = compare(perturbed(reference), (port, params), np.eye(5))
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (5, 7)
    assert report.remarks[0].startswith("2 gradients were not compared")
    assert "1.running_mean, 1.running_var" in report.remarks[0]


class PaddedLookup(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 7, padding_idx=2)
        torch.nn.init.normal_(self.table.weight)

    def forward(self, ids):
        return torch.tanh(self.table(ids))


@pytest.mark.parametrize("is_trained", [True, False])
def test_the_row_of_a_padding_token_that_pytorch_does_not_train_is_no_bug(is_trained):
    reference = PaddedLookup()
    ids = np.array([[3, 2, 5, 2], [2, 10, 0, 3]])

    def candidate(table, ids):
        rows = table[ids]
        if not is_trained:
            rows = jnp.where((ids == 2)[..., None], jax.lax.stop_gradient(rows), rows)
        return jnp.tanh(rows)

    table = reference.table.weight.detach().numpy()
    report = compare(reference, (candidate, table), ids)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (1, 1)
    remark = "the reference gives padding tokens no gradient, the candidate does: table.weight"
    assert report.remarks == ((f"{remark} (row 2)",) if is_trained else ())
    wrong = compare(reference, (lambda t, i: jnp.tanh(jax.lax.stop_gradient(t)[i]), table), ids)
    assert wrong.verdict == "bug"
    assert all(cause.is_backward for cause in wrong.root_causes)


def test_what_cannot_be_differentiated_is_said():
    linear = torch.nn.Linear(4, 4)
    params = {"w": linear.weight.detach().numpy(), "b": linear.bias.detach().numpy()}

    def port(p, x):
        _, x = jax.lax.while_loop(
            lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] @ p["w"].T + p["b"]), (0, x)
        )
        return x

    report = compare(linear, (port, params), np.random.default_rng(0).normal(size=(3, 4)))
    assert report.verdict == "rounding"
    (remark,) = report.remarks
    assert remark.startswith("gradients were not compared: the candidate cannot be differentiated")

    class Written(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            y = self.linear(x)
            torch.sigmoid_(y).mul_(2)
            return y

    def written(p, x):
        return 2 * jax.nn.sigmoid(x @ p["w"].T + p["b"])

    report = compare(Written(), (written, params), np.random.default_rng(0).normal(size=(3, 4)))
    assert report.verdict == "rounding"
    (remark,) = report.remarks
    assert remark.startswith("gradients were not compared: the reference cannot be differentiated")


def test_results_that_are_no_numbers_have_no_gradients():
    reference = torch.nn.Sequential(torch.nn.Linear(300, 70), torch.nn.ReLU())
    params = {n: p.detach().numpy() for n, p in reference.named_parameters()}

    def port(p, x):
        return jax.nn.relu(x @ p["0.weight"].T + p["0.bias"])

    x = np.random.default_rng(0).normal(size=(4, 300))
    x[1, 2] = np.nan
    report = compare(reference, (port, params), {"input": x}, jax_inputs=x)
    assert report.verdict == "rounding", str(report)
    assert report.remarks[-1] == (
        "gradients were not compared: the results of the reference have NaN, and so have its "
        "inputs: input"
    )


class Crossed(torch.nn.Module):
    """Attends to another sequence, which may be the same one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, memory):
        return torch.softmax(self.q(x) @ self.k(memory).mT, -1) @ memory


@pytest.mark.parametrize("names", [None, ("x", "memory")])
def test_two_inputs_with_the_same_numbers_have_gradients_of_their_own(names):
    def port(params, x, memory):
        q, k = (
            given @ params[f"{name}.weight"].T + params[f"{name}.bias"]
            for name, given in (("q", x), ("k", memory))
        )
        return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ memory

    reference = Crossed()
    arrays = {name: p.detach().numpy() for name, p in reference.named_parameters()}
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    given = [x, x.copy()] if names is None else dict(zip(names, (x, x), strict=True))
    report = compare(reference, (port, arrays), given)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (6, 6)
    # One input for both of the reference's has the sum of their gradients.
    port_of_one = (lambda params, x: port(params, x, x), arrays)
    report = compare(reference, port_of_one, given, jax_inputs=[x])
    assert report.verdict == "rounding", str(report)

    def stopped(params, x, memory):
        return port(params, jax.lax.stop_gradient(x), memory)

    assert compare(reference, (stopped, arrays), given).verdict == "bug"
