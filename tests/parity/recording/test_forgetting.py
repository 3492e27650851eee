"""Large values that are soon made again are forgotten; what is read is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare
from jaxformer.parity.matching.values import Index
from jaxformer.parity.recording.operators import graph, torch_weights
from jaxformer.parity.recording.operators.candidates import as_candidate
from jaxformer.parity.recording.operators.equations import function_of
from jaxformer.parity.recording.operators.graph import Recent, Value
from jaxformer.parity.recording.operators.jax_run import JaxRun
from jaxformer.parity.recording.operators.numpy_operators import numpy_function
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.recording.operators.torch_run import TorchRun

pytestmark = pytest.mark.usefixtures("settings_of_jax")

X = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)


@pytest.fixture
def everything_is_forgotten(monkeypatch):
    """Every value that may be forgotten is, as soon as another one is read."""
    monkeypatch.setattr(graph, "LARGE", 1)
    monkeypatch.setattr(graph, "MOST_BYTES", 0)
    monkeypatch.setattr(graph, "MOST_STEPS", 5000)
    monkeypatch.setattr(graph, "SMALL", 0)


def chain(tape: Tape, data: np.ndarray, length: int) -> list[Value]:
    """Returns an input and so many values, each larger by 1 than the one before."""
    values = [tape.add(data, "input", "x")]
    for place in range(1, length + 1):
        # What is recorded is not read from the tape: that would make each value from the first on.
        values += tape.record("add", [values[-1]], [data + place], lambda x: [x + 1])
    return values


def is_kept(value: Value) -> bool:
    return value._data is not None


def test_a_value_that_was_forgotten_is_made_again(everything_is_forgotten):
    tape = Tape(observe=lambda value: None)
    values = chain(tape, np.arange(4.0), 3000)
    assert sum(map(is_kept, values)) == 1, "the input"
    assert (values[1000].data == np.arange(4.0) + 1000).all()


@pytest.mark.parametrize("limits", [{"MOST_STEPS": 3}, {"SMALL": 32, "MOST_STEPS_OF_SMALL": 3}])
def test_what_takes_many_operators_is_kept(everything_is_forgotten, monkeypatch, limits):
    for name, value in limits.items():
        monkeypatch.setattr(graph, name, value)
    tape = Tape(observe=lambda value: None)
    values = chain(tape, np.arange(4.0), 10)
    assert [values.index(value) for value in values if is_kept(value)] == [0, 4, 8]


def test_a_view_is_no_step(everything_is_forgotten, monkeypatch):
    monkeypatch.setattr(graph, "MOST_STEPS", 1)
    tape = Tape(observe=lambda value: None)
    values = chain(tape, np.arange(4.0), 1)
    for _ in range(3):
        values += tape.record("reshape", [values[-1]], [values[-1].data], lambda x: [x])
    values += tape.record("concatenate", [values[-1]], [values[-1].data], lambda x: [x.copy()])
    assert [value.steps for value in values[1:]] == [1, 1, 1, 1, 2]
    assert [values.index(value) for value in values if is_kept(value)] == [0, 5]


@pytest.mark.parametrize(("batch", "is_quick"), [((4,), True), ((), False)])
def test_a_product_for_each_head_is_forgotten(everything_is_forgotten, batch, is_quick):
    function = {True: lambda x: jnp.einsum("bij,bkj->bik", x, x), False: lambda x: x @ x.T}
    tape = Tape(observe=lambda value: None)
    x = np.ones((*batch, 3, 5), np.float32)
    JaxRun(as_candidate((lambda _, x: function[is_quick](x), {})), [x], {}, tape, {}, False)
    (product,) = [op.outputs[0] for op in tape.operators if op.name == "dot_general"]
    assert product.is_quick == is_quick


def test_a_value_is_made_of_an_array_that_is_there(everything_is_forgotten):
    tape = Tape(observe=lambda value: None)
    values = chain(tape, np.arange(4.0), 3)
    other = np.full(4, 7.0)
    assert (values[3].data_beside({values[2].index: other}) == 8).all()
    assert values[3].data_beside({values[3].index: other}) is other


def sum_of_products(tape: Tape, second: str) -> tuple[Value, list[np.ndarray]]:
    """Returns a product plus another value, forgotten, and the arrays of all products made."""
    made: list[np.ndarray] = []

    def product(one, other):
        made.append(one @ other)
        return [made[-1]]

    first = tape.add(np.arange(9.0).reshape(3, 3), "input", "x")
    (one,) = tape.record("mm", [first, first], product(first.data, first.data), product)
    others = {
        "an input": lambda: first,
        "itself": lambda: one,
        "itself turned": lambda: tape.record("t", [one], [one.data.T], lambda x: [x.T])[0],
        "a product": lambda: tape.record("mm", [first, first], [one.data], product)[0],
    }
    other = others[second]()
    (total,) = tape.record("add", [one, other], [one.data + other.data], lambda *xs: [sum(xs)])
    tape.forget_gradient(total)
    return total, made


@pytest.mark.parametrize("second", ["an input", "itself", "itself turned", "a product"])
def test_a_large_sum_takes_the_memory_of_what_it_adds(everything_is_forgotten, monkeypatch, second):
    monkeypatch.setattr(graph, "ADDED_AT_ONCE", 1)
    tape = Tape(observe=lambda value: None)
    total, made = sum_of_products(tape, second)
    x = np.arange(9.0).reshape(3, 3)
    wanted = x @ x + {"an input": x, "itself turned": (x @ x).T}.get(second, x @ x)
    made.clear()
    array = total.data
    np.testing.assert_array_equal(array, wanted)
    np.testing.assert_array_equal(tape.inputs[0].data, x, "the input is as it was")
    # What is read turned is needed until the last row is there.
    assert (array is made[0]) == (second != "itself turned")


def indexed_product(tape):
    """An index of a tape's values, a product among them, its view, and what is made again."""
    index = Index()
    total, made = sum_of_products(tape, "itself turned")
    index.add(tape.values)
    for value in tape.values:
        index.note(value)
    return index, *total.producer.inputs, made


def test_views_of_an_array_that_was_made_again_are_looked_at_together(everything_is_forgotten):
    index, product, turned, made = indexed_product(Tape(observe=lambda value: None))
    array = product.data
    made.clear()
    assert [match.value for match in index.find(array)] == [product, turned]
    assert len(made) == 1


def test_what_equals_none_but_its_views_is_not_read(everything_is_forgotten):
    tape = Tape(observe=lambda value: None)
    index, product, _, made = indexed_product(tape)
    made.clear()
    assert index.twins(product) == []
    assert made == []
    (twin,) = tape.record("copy of another", [product], [product.data + 0], lambda x: [x + 0])
    index.add([twin])
    assert [match.value for match in index.twins(product)] == [twin]


def test_the_gradient_of_a_parameter_is_forgotten(everything_is_forgotten):
    """And so is what it is the sum of, a product too."""
    tape = Tape(observe=lambda value: None)
    first = tape.add(np.ones((3, 3)), "input", "x")
    (product,) = tape.record("dot_general", [first, first], [np.full((3, 3), 3.0)], _product)
    (total,) = tape.record("add", [product, first], [np.full((3, 3), 4.0)], lambda *xs: [sum(xs)])
    tape.forget_gradient(total)
    assert not is_kept(product)
    assert not is_kept(total)
    assert (total.data == 4).all()


def _product(one, other):
    return [one @ other]


class Lookup(torch.nn.Module):
    """A weight that is read twice, once turned round, and one that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(7, 5)
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(2)
        return (self.table(ids) * self.scale) @ self.table.weight.T


def test_weights_are_in_memory_only_while_they_are_read(monkeypatch):
    monkeypatch.setattr(torch_weights, "LARGE", 1)
    monkeypatch.setattr(graph, "LARGE", 1)
    module = Lookup()
    table = module.table.weight.detach().double()
    ids = torch.tensor([[1, 3, 3, 6]])
    run = TorchRun(module, [ids], {}, backward=False)
    (output,) = run.tape.outputs
    np.testing.assert_allclose(output.data, 2 * table[ids] @ table.T, rtol=1e-14)
    np.testing.assert_array_equal(run.tape.parameters["table.weight"].data, table)
    assert (module.scale == 1).all(), "the module itself is not changed"


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: torch.from_numpy(weight.detach().numpy().max(keepdims=True)[0]),
        lambda weight: torch.tensor(weight.tolist()).max(),
        lambda weight: torch.from_numpy(np.asarray(weight.detach())).amax(),
        lambda weight: torch.from_dlpack(weight.detach()).amax(),
    ],
)
def test_a_weight_that_no_operator_reads_has_its_numbers(monkeypatch, read):
    class Module(torch.nn.Linear):
        """Divides by its largest weight, which is read past PyTorch's operators."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = super().forward(x)
            return first / read(self.weight) + super().forward(x)

    monkeypatch.setattr(torch_weights, "LARGE", 1)
    torch.manual_seed(0)
    module = Module(5, 8)
    run = TorchRun(module, [X], {})
    wide = module.double()
    with torch.no_grad():
        wanted = wide(torch.from_numpy(X).double())
    np.testing.assert_allclose(run.tape.outputs[0].data, wanted, rtol=1e-12)


@pytest.mark.parametrize("batch", [(4,), (2, 2)])
def test_rows_that_are_added_to_rows(batch):
    random = np.random.default_rng(1)
    ids, rows = random.integers(0, 7, batch), random.normal(size=(*batch, 5))

    def add(x, rows):
        return x.at[ids].add(rows, mode="drop")

    with jax.enable_x64(True):
        x = random.normal(size=(7, 5))
        jaxpr = jax.make_jaxpr(add)(x, rows)
        (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "scatter-add"]
        places = ids.reshape(*batch, 1)
        (made,) = function_of(equation)(x, places, rows)
        assert numpy_function("scatter-add", equation.params, False, 1) is not None
        np.testing.assert_allclose(made, add(jnp.asarray(x), rows), rtol=1e-14)
        (outside,) = function_of(equation)(x, places + 7, rows)
        np.testing.assert_array_equal(outside, x)
        (short,) = function_of(equation)(x, places, rows[..., :3])
        np.testing.assert_allclose(short[:, :3], made[:, :3], rtol=1e-14)
        np.testing.assert_array_equal(short[:, 3:], x[:, 3:])


def test_small_values_and_those_of_dear_operators_are_kept():
    tape = Tape(observe=lambda value: None)
    assert all(map(is_kept, chain(tape, np.arange(4.0), 10)))
    first = tape.add(np.ones(graph.LARGE), "input", "y")
    (product,) = tape.record("dot_general", [first], [first.data + 1], lambda y: [y + 1])
    assert not product.is_quick


def test_what_was_put_right_is_no_longer_made_again(everything_is_forgotten):
    tape = Tape(observe=lambda value: None)
    values = chain(tape, np.ones(4), 3)
    values[2].data = np.full(4, 7.0)
    assert (values[1].data == 2).all(), "which forgets the third one"
    assert (values[2].data == 7).all()
    assert (values[3].data == 8).all()


def test_a_value_that_stands_for_another_follows_it(everything_is_forgotten):
    recent = Recent()
    other = np.arange(3.0)
    value = Value(0, np.zeros(3))
    value.stand_for(lambda: other, recent)
    assert value.stands_for_another
    assert (value.data == other).all()


class Reference(torch.nn.Module):
    """Integers that become floats, a view, memory that is written to, complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, 9) / 7
        hidden = self.first(x) * places
        hidden = hidden.view(-1, 2, 4).exp().log().reshape(-1, 8)
        turned = torch.view_as_real(torch.view_as_complex(hidden.reshape(-1, 4, 2)) * 1j)
        made = torch.nn.functional.gelu(turned.reshape(-1, 8))
        made = made.clone().add_(1)
        return self.second(made)


def test_a_run_of_pytorch_is_read_as_if_all_were_kept(monkeypatch):
    module = Reference()
    kept = TorchRun(module, [X], {})
    monkeypatch.setattr(graph, "LARGE", 1)
    monkeypatch.setattr(graph, "MOST_BYTES", 0)
    seen: list[Value] = []
    run = TorchRun(module, [X], {}, before_forgetting=seen.append)
    cotangent = np.ones((3, 4))
    both = [
        one.backward({one.tape.outputs[0].index: cotangent}) and one.tape.values
        for one in (kept, run)
    ]
    assert len(seen) > 20
    assert not any(map(is_kept, seen))
    for wanted, value in zip(*both, strict=True):
        assert value.data.dtype == wanted.data.dtype
        # Arrays that lie in another order in memory may be rounded otherwise.
        np.testing.assert_allclose(value.data, wanted.data, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("is_exact", [True, False])
def test_the_report_is_the_same(monkeypatch, is_exact):
    """With a bug in the middle, what comes after it is put right from values made again."""
    torch.manual_seed(0)
    reference = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.Linear(8, 4), torch.nn.GELU()
    )
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in reference.named_parameters()}

    def port(params, x):
        x = x @ params["0.weight"].T + params["0.bias"]
        x = jax.nn.gelu(x, approximate=not is_exact)
        x = x @ params["2.weight"].T + params["2.bias"]
        return jax.nn.gelu(x, approximate=False)

    wanted = str(compare(reference, (port, params), X))
    assert ("tanh form" in wanted) != is_exact
    monkeypatch.setattr(graph, "LARGE", 1)
    monkeypatch.setattr(graph, "MOST_BYTES", 0)
    assert str(compare(reference, (port, params), X)) == wanted
