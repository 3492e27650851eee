"""What a user does wrong is said in a line, with the side; errors of jaxformer's own stay."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.errors import UsageError
from jaxformer.parity import compare
from jaxformer.parity.recording.operators import jax_run
from jaxformer.parity.recording.operators.torch_run import TorchRun

pytestmark = pytest.mark.usefixtures("settings_of_jax")

X = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
LINEAR = torch.nn.Linear(5, 3)
PARAMS = {"w": LINEAR.weight.detach().numpy(), "b": LINEAR.bias.detach().numpy()}


def port(params, x):
    return jnp.dot(x, params["w"].T) + params["b"][None]


def message(*arguments, **options):
    with pytest.raises(UsageError) as found:
        compare(*arguments, **options)
    text = str(found.value)
    assert "\n" not in text
    return text, found.value.__cause__


@pytest.mark.parametrize("backward", [True, False])
def test_a_wrong_shape_names_the_side(backward):
    text, cause = message(LINEAR, (port, PARAMS), X[:, :4], backward=backward)
    assert text.startswith("the inputs do not fit the reference: RuntimeError: ")
    assert text.endswith("(2x4 and 5x3); given: float32 (2, 4)")
    assert isinstance(cause, RuntimeError)
    narrow = {"jax_inputs": {"x": X[:, :4]}}
    text, cause = message(LINEAR, (port, PARAMS), X, **narrow, backward=backward)
    assert text.startswith("the inputs do not fit the candidate: TypeError: ")
    assert "test_failures.py:" in text
    assert text.endswith("given: x float32 (2, 4)")
    assert isinstance(cause, TypeError)


def test_an_error_of_a_model_is_no_fault_of_its_inputs():
    text, cause = message(LINEAR, (port, {"w": PARAMS["w"]}), X)
    assert text.startswith("the candidate raised KeyError: 'b' at ")
    assert isinstance(cause, KeyError)
    text, _ = message(LINEAR, (port, PARAMS), X, torch_call=lambda model, given: 1 // 0)
    assert text.startswith("the reference raised ZeroDivisionError: integer division")
    text, _ = message(torch.nn.Module(), (port, PARAMS), X)
    assert text.startswith("the reference raised NotImplementedError: ")


def test_ids_given_as_floats():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(7, 5)

        def forward(self, ids):
            return self.table(ids)

    model = Model()
    params = {"table": model.table.weight.detach().numpy()}
    ids = np.array([[0, 3, 6]], np.float32)
    text, _ = message(model, (lambda params, ids: params["table"][ids], params), {"ids": ids})
    assert text.endswith("; given: ids float32 (1, 3) (floats are compared in float64)")


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [("relu", "str"), (len, "builtin_function_or_method"), (np.array("a"), "ndarray")],
)
def test_a_parameter_that_is_no_array_is_named(leaf, kind):
    text, _ = message(LINEAR, (port, {**PARAMS, "inner": {"act": leaf}}), X)
    assert text.startswith(f"the parameter inner.act of the candidate is no array but a {kind}: ")
    text, _ = message(LINEAR, (port, leaf), X)
    assert text.startswith(f"what a function is given is no array but a {kind}: ")


def test_parameters_may_be_tensors():
    params = {"w": LINEAR.weight, "b": LINEAR.bias}
    assert compare(LINEAR, (port, params), X).verdict in ("exact", "rounding")


@pytest.mark.parametrize("reference", [port, None, (port, PARAMS)])
def test_a_reference_that_is_no_module(reference):
    text, _ = message(reference, (port, PARAMS), X)
    assert text == f"the reference must be a torch.nn.Module: got {type(reference).__name__}"


def test_an_empty_batch():
    text, _ = message(LINEAR, (port, PARAMS), X[:0])
    assert text.startswith("the reference's results are empty, of shape (0, 3)")


def test_an_input_may_be_empty_beside_others():
    class Model(torch.nn.Module):
        def forward(self, x, cache):
            return x + (cache @ cache.mT).sum()

    candidate = lambda _, x, cache: x + (cache @ cache.mT).sum()  # noqa: E731
    report = compare(Model(), (candidate, {}), [X, X[:0]])
    assert report.verdict in ("exact", "rounding")


@pytest.mark.parametrize("inputs", ["hello", None])
def test_inputs_that_are_no_arrays(inputs):
    text, _ = message(LINEAR, (port, PARAMS), inputs)
    assert text.endswith(f"a list of arrays, or a dict of arrays: got {inputs!r}")


def test_inputs_that_are_no_numbers():
    text, _ = message(LINEAR, (port, PARAMS), [np.array(["hello"])])
    assert text == "inputs must hold numbers: got an array of <U5"
    text, _ = message(LINEAR, (port, PARAMS), X, jax_inputs=[X, "hello"])
    assert text.startswith("the input 1 of the candidate holds what is no number")


def test_errors_of_jaxformer_are_not_the_users(monkeypatch):
    def fail(*args):
        raise ValueError("our own")

    with monkeypatch.context() as patched:
        patched.setattr(jax_run, "interpret", fail)
        with pytest.raises(ValueError, match="our own"):
            compare(LINEAR, (port, PARAMS), X)
    # It is called inside the user's model.
    monkeypatch.setattr(TorchRun, "_leave", fail)
    with pytest.raises(ValueError, match="our own"):
        compare(LINEAR, (port, PARAMS), X)


def test_a_lack_of_memory_stays_one():
    def run_out(params, x):
        raise MemoryError

    with pytest.raises(MemoryError):
        compare(LINEAR, (run_out, PARAMS), X)
