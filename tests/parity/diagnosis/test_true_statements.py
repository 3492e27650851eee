"""A diagnosis says what is true of the two sides, and nothing that only happens to fit."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")

RANDOM = np.random.default_rng(0)
FLOATS = RANDOM.normal(size=(3, 4, 8))
SPLINES = np.tanh(RANDOM.normal(size=(6, 3)))
KNOTS = np.arange(-3, 9) * 0.4 - 1


class Linear(torch.nn.Module):
    """A layer, other parameters, and a function of both."""

    def __init__(self, function, width=8, **parameters):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = torch.nn.Linear(8, width), function
        for name, array in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(torch.as_tensor(array)))

    def forward(self, *inputs):
        return self.function(self, *inputs)


def diagnoses(reference, port, *inputs):
    """Returns the diagnoses of a port with a bug."""
    arrays = {name: p.detach().numpy() for name, p in reference.named_parameters()}
    report = compare(reference, (port, arrays), [*inputs])
    assert report.verdict == "bug", str(report)
    return [cause.diagnosis for cause in report.root_causes]


def linear(params, x):
    return x @ params["layer.weight"].T + params["layer.bias"]


def test_a_forgotten_scale_is_no_rotation():
    def right(self, x):
        scores = self.layer(self.beta * self.layer(x))
        return torch.softmax(scores, -1)

    def port(params, x):
        return jax.nn.softmax(linear(params, linear(params, x)))

    reference = Linear(right, beta=0.73)
    assert diagnoses(reference, port, FLOATS) == ["the reference's value is 0.73 = beta times this"]


def test_a_factor_of_zeros_and_ones_is_no_activation_function():
    def right(self, x, y):
        z = self.layer(x).sigmoid()
        losses = y * (0.9 - z).relu() ** 2 + 0.5 * (1 - y) * (z - 0.1).relu() ** 2
        return z, losses.sum()

    def port(params, x, y):
        z = jax.nn.sigmoid(linear(params, x))
        losses = y * jax.nn.relu(0.9 - z) ** 2 + (1 - y) * jax.nn.relu(z - 0.1) ** 2
        return z, losses.sum()

    found = diagnoses(Linear(right), port, FLOATS[0], np.eye(8)[:4])
    assert len(found) == 1
    assert "0.5" in found[0]


@pytest.mark.parametrize(
    ("right", "own", "texts"),
    [
        # The factor is another one for every batch.
        (lambda x: torch.logsumexp(x, (0, 1, 2)), lambda x: jnp.tanh(x).sum(), [""]),
        (
            lambda x: x.tanh().mean(),
            lambda x: jnp.tanh(x).sum(),
            ["the reference's value is 0.0104167 = 1/96 times this"],
        ),
    ],
)
def test_a_single_number_is_called_a_multiple_only_of_a_plain_number(right, own, texts):
    reference = Linear(lambda self, x: right(self.layer(x)))
    assert diagnoses(reference, lambda p, x: own(linear(p, x)), FLOATS) == texts


def test_a_variance_before_its_eps_is_no_norm():
    def right(self, x):
        y = self.layer(x)
        return (y - y.mean(-1, keepdim=True)) / torch.sqrt(y.var(-1, False, keepdim=True) + 1e-5)

    def port(params, x):
        y = linear(params, x)
        deviation = jnp.sqrt(y.var(-1, keepdims=True, ddof=1) + 1e-5)
        return (y - y.mean(-1, keepdims=True)) / deviation

    assert diagnoses(Linear(right), port, FLOATS) == [
        "the candidate computes the variance with n - 1 in place of n; "
        "the reference computes the variance"
    ]


def splines(x, is_wrong=False):
    """Returns B-splines, whose sum is 1 and of which most are 0."""
    x = x[..., None]
    bases = ((x >= KNOTS[:-1]) & (x < KNOTS[1:])) * 1.0
    for degree in range(1, 4):
        before = (x - KNOTS[: -degree - 1]) / (0.4 * degree)
        after = (KNOTS[degree + 1 :] - x) / (0.4 * degree)
        parts = (bases[..., 1:], bases[..., :-1]) if is_wrong else (bases[..., :-1], bases[..., 1:])
        bases = before * parts[0] + after * parts[1]
    return bases


def test_zeros_of_splines_are_no_mask():
    class Splines(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = torch.nn.Parameter(torch.randn(2, 8))
            self.register_buffer("knots", torch.as_tensor(KNOTS), persistent=False)

        def forward(self, x):
            x, knots = x[..., None], self.knots.to(x.dtype)
            bases = ((x >= knots[:-1]) & (x < knots[1:])).to(x.dtype)
            for degree in range(1, 4):
                before = (x - knots[: -degree - 1]) / (0.4 * degree)
                after = (knots[degree + 1 :] - x) / (0.4 * degree)
                bases = before * bases[..., :-1] + after * bases[..., 1:]
            return bases @ self.weight.T

    def port(params, x):
        return splines(x, is_wrong=True) @ params["weight"].T

    assert not any("mask" in text for text in diagnoses(Splines(), port, SPLINES))


def test_a_parameter_that_is_read_with_its_axes_exchanged_is_said_to_be():
    reference = Linear(
        lambda self, y: self.moves[y[:, :-1], y[:, 1:]].sum(1), moves=FLOATS[0, :, :4]
    )
    found = diagnoses(
        reference,
        lambda params, y: params["moves"][y[:, 1:], y[:, :-1]].sum(1),
        RANDOM.integers(0, 4, (2, 7)),
    )
    assert found == ["gather reads moves; it must read it with axes 0 and 1 exchanged"]


def test_what_has_no_line_is_named_by_the_line_that_reads_it():
    def right(self, x):
        mixed = torch.einsum("bix,iox->box", torch.fft.rfft(x)[..., :3], self.mixing)
        return torch.fft.irfft(mixed, n=8)

    def port(params, x):
        spectrum = jnp.fft.rfft(x)[..., :3]
        return jnp.fft.irfft(jnp.einsum("bix,oix->box", spectrum, params["mixing"]), n=8)

    numbers = RANDOM.normal(size=(2, 4, 4, 3)).astype(np.float32)
    reference = Linear(right, mixing=numbers[0] + 1j * numbers[1])
    arrays = {"mixing": reference.mixing.detach().numpy()}
    report = compare(reference, (port, arrays), FLOATS)
    assert report.verdict == "bug"
    assert [cause.jax_source.startswith(__file__) for cause in report.root_causes] == [True]


@pytest.mark.parametrize(
    ("right", "own", "text"),
    [
        # Half of the number of rows in the mean would be right too.
        (
            lambda y: y[0].tanh().sum() / 4 * 4,
            lambda y: jnp.tanh(y[0]).sum(-1).mean() * 2,
            "the number 2 in mul must be 4",
        ),
        (
            lambda y: torch.tanh(y) * 1.5,
            lambda y: jnp.tanh(y).clip(max=0.5) * 1.5,
            "the limit 0.5 by min is one step too many: the reference has no such step",
        ),
        (
            lambda y: y.clamp(max=0.3).tanh(),
            lambda y: jnp.tanh(y.clip(max=0.4)),
            "the number 0.4 in min must be 0.3",
        ),
        (
            # What is between the two is a known value.
            lambda y: (y - y.cumsum(2)) ** 2 - (y - y.flip(0)) ** 2,
            lambda y: (y - y.cumsum(2)) ** 2 - (y.cumsum(2) - y[::-1]) ** 2,
            "sub reads the cumsum of the model; it must read the add of layer",
        ),
        (
            lambda y: y.tanh().sin() * torch.nn.functional.silu(y),
            lambda y: jnp.sin(jnp.tanh(y)) * jax.nn.sigmoid(y),
            "the candidate computes the sigmoid; the reference computes SiLU",
        ),
        (
            # Twice the mean, subtracted before the squares, would leave their mean as it is.
            lambda y: y * (y.square().mean(-1, keepdim=True) + 0.1).rsqrt(),
            lambda y: y * jax.lax.rsqrt(jnp.var(y, -1, keepdims=True) + 0.1),
            "the mean is subtracted; the reference does not subtract it",
        ),
        (
            lambda y: (y - y.mean(-1, keepdim=True)).sin().square(),
            lambda y: jnp.square(jnp.sin(y)),
            "the mean is not subtracted; the reference subtracts it",
        ),
        (
            # Three halves of the exponent would do as well.
            lambda y: y[..., :4] * 1e6 ** -(torch.arange(4, dtype=y.dtype) / 4),
            lambda y: y[..., :4] / 1e4 ** (jnp.arange(0, 8, 2, dtype=y.dtype) / 8)[None, None],
            "the number 10000 in pow must be 1e+06",
        ),
        (
            # Positions that are one later would do as well.
            lambda y: torch.ones(4, 4, dtype=y.dtype).tril().cumsum(0) @ y,
            lambda y: (jnp.arange(4)[:, None] > jnp.arange(4)[None]).astype(float).cumsum(0) @ y,
            "the comparison > must be >=",
        ),
    ],
)
def test_the_plainest_cause_is_named(right, own, text):
    reference = Linear(lambda self, x: right(self.layer(x)))
    found = diagnoses(reference, lambda params, x: own(linear(params, x)), FLOATS)
    assert [text in one for one in found] == [True], found


def test_an_input_that_is_read_wrongly_is_called_an_input():
    def right(self, x):
        rest = x - torch.tanh(self.layer(x))
        return rest - torch.tanh(self.layer(rest))

    def port(params, x):
        rest = x - jnp.tanh(linear(params, x))
        return x - jnp.tanh(linear(params, rest))

    (found,) = diagnoses(Linear(right), port, FLOATS)
    assert found.startswith("sub reads the input 0; it must read the sub of the model"), found


class Flow(torch.nn.Module):
    """Layers that change one half of the numbers, in turn, and reverse all of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 6) for _ in range(3))
        self.register_buffer("places", torch.arange(5, -1, -1), persistent=False)

    def forward(self, x):
        total = 0
        for place, layer in enumerate(self.layers):
            one, two = x.chunk(2, -1)
            if place == 1:
                one, two = two, one
            factor, term = layer(one).chunk(2, -1)
            factor = torch.tanh(factor)
            two = two * torch.exp(factor) + term
            if place == 1:
                one, two = two, one
            x, total = torch.cat([one, two], -1)[:, self.places], total + factor.sum(-1)
        return {"x": x, "total": total, "loss": (0.5 * (x**2).sum(-1) - total).mean()}


def test_a_step_that_the_reference_has_too_is_not_too_many():
    def port(params, x):
        total = 0
        for place in range(3):
            one, two = jnp.split(x, 2, -1)
            if place == 1:
                one, two = two, one
            weight, bias = params[f"layers.{place}.weight"], params[f"layers.{place}.bias"]
            factor, term = jnp.split(one @ weight.T + bias, 2, -1)
            factor = jnp.tanh(factor)
            # The halves of the second layer are not put back.
            two = two * jnp.exp(factor) + term
            x, total = jnp.concatenate([one, two], -1)[:, ::-1], total + factor.sum(-1)
        return {"x": x, "total": total, "loss": (0.5 * (x**2).sum(-1) - total).mean()}

    found = diagnoses(Flow(), port, np.random.default_rng(0).normal(size=(5, 6)))
    assert found
    assert not any("one step too many" in text for text in found), found


def test_of_two_equal_values_the_later_one_is_what_the_reference_computes_later():
    def right(self, x):
        scores = self.layer(x) @ x.T
        return (
            torch.log_softmax(scores, 1).diag().mean() + torch.log_softmax(scores, 0).diag().mean()
        )

    def port(params, x):
        scores = linear(params, x) @ x.T
        rows = jnp.diag(jax.nn.log_softmax(scores, axis=1)).mean()
        columns = jnp.diag(jax.nn.log_softmax(scores, axis=1)).mean()
        return rows + columns

    reference = Linear(right)
    arrays = {name: p.detach().numpy() for name, p in reference.named_parameters()}
    (cause,) = compare(reference, (port, arrays), FLOATS[0]).root_causes
    path, _, line = cause.jax_source.rpartition(":")
    assert "columns =" in Path(path).read_text().splitlines()[int(line) - 1]
    assert "(number 2 of 4); it must read number 4 of them" in cause.diagnosis


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_that_drops(params, x):
    q, k, v = jnp.split(x @ params["qkv.weight"].T + params["qkv.bias"], 3, -1)
    scores = jnp.where(np.tri(x.shape[-2], dtype=bool), q @ k.swapaxes(-1, -2) / 4, -jnp.inf)
    weights = jax.nn.softmax(scores)
    keep = jax.random.bernoulli(jax.random.key(0), 0.8, weights.shape)
    return jnp.where(keep, weights / 0.8, 0) @ v


def test_weights_that_are_dropped_are_no_mask():
    module = Attention()
    arrays = {name: array.detach().numpy() for name, array in module.named_parameters()}
    x = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)
    report = compare(module, (attention_that_drops, arrays), x)
    assert report.verdict == "bug"
    assert not any("mask" in cause.diagnosis for cause in report.root_causes)


class Distances(torch.nn.Module):
    """A bias by the logarithm of how far tokens are apart, as T5's buckets have it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        places = torch.arange(6)
        far = (places[:, None] - places).abs().to(x.dtype)
        return x + self.weight * torch.where(far < 1, far, torch.log(far / 4))


def test_infinities_that_no_softmax_reads_are_no_mask():
    def port(params, x):
        places = jnp.arange(6)
        far = jnp.abs(places[:, None] - places).astype(x.dtype)
        logs = jnp.log(jnp.maximum(far, 1) / 5)
        return x + params["weight"] * jnp.where(far < 1, far, logs)

    module = Distances()
    arrays = {"weight": module.weight.detach().numpy()}
    x = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    report = compare(module, (port, arrays), x)
    assert report.verdict == "bug"
    assert not any("mask" in cause.diagnosis for cause in report.root_causes)


def test_an_eps_that_is_nearly_none_is_one():
    def reference(module, x):
        x = module.layer(x)
        return (x / (x.abs().sum(-1, keepdim=True) + 1e-12)) @ module.last.T

    def port(params, x):
        x = linear(params, x)
        return (x / (jnp.abs(x).sum(-1, keepdims=True) + 1e-4)) @ params["last"].T

    given = Linear(reference, last=RANDOM.normal(size=(3, 8)))
    assert diagnoses(given, port, FLOATS) == ["the number 0.0001 in add must be 1e-12"]


def test_a_norm_with_a_tiny_eps_is_said_to_have_it():
    def reference(module, x):
        x = torch.nn.functional.layer_norm(module.layer(x), (8,), module.scale, eps=1e-12)
        return x @ module.last.T

    def port(params, x):
        x = linear(params, x)
        centred = x - x.mean(-1, keepdims=True)
        root = jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-6)
        return (centred / root * params["scale"]) @ params["last"].T

    given = Linear(reference, scale=RANDOM.normal(size=8), last=RANDOM.normal(size=(3, 8)))
    (text,) = diagnoses(given, port, FLOATS)
    assert "1e-12" in text
    assert "no such step" not in text


def test_a_forgotten_bias_that_is_added_with_the_mask_is_no_other_mask():
    sees = np.tril(np.ones((4, 4), bool))

    def reference(module, x):
        y = module.layer(x)
        mask = torch.where(torch.as_tensor(sees), module.table[module.places], -3e38)
        return torch.softmax(y @ y.mT + mask, -1) @ x

    def port(params, x):
        y = linear(params, x)
        scores = jnp.where(sees, y @ y.swapaxes(-1, -2), -3e38)
        return jax.nn.softmax(scores) @ x

    given = Linear(reference, table=RANDOM.normal(size=5))
    given.places = torch.as_tensor(np.abs(np.subtract.outer(np.arange(4), np.arange(4))))
    (text,) = diagnoses(given, port, FLOATS)
    assert text.startswith("the parameter table is missing: the reference's add at ")


class Crossed(torch.nn.Module):
    """Attends to another sequence, after a norm whose bias is zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(8)
        self.q, self.k, self.v = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, memory):
        scores = self.q(self.norm(x)) @ self.k(memory).mT
        return torch.softmax(scores, -1) @ self.v(memory)


def test_keys_of_the_wrong_sequence_are_the_one_cause():
    def port(params, x, memory):
        centred = x - x.mean(-1, keepdims=True)
        x = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
        x = x * params["norm.weight"] + params["norm.bias"]
        q, k, v = (
            given @ params[f"{name}.weight"].T + params[f"{name}.bias"]
            for name, given in (("q", x), ("k", x), ("v", memory))
        )
        return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v

    memory = RANDOM.normal(size=FLOATS.shape)
    assert diagnoses(Crossed(), port, FLOATS, memory) == [
        "it equals the mul of norm; it must be the input 1"
    ]


class Feed(torch.nn.Module):
    """Two matrices with a function between them."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 16, bias=False)
        self.last = torch.nn.Linear(16, 8, bias=False)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


@pytest.mark.parametrize(
    ("function", "own", "expected"),
    [
        (
            lambda x: torch.relu(x) ** 2,
            jax.nn.relu,
            "the candidate computes ReLU; the reference computes the square of ReLU",
        ),
        (
            lambda x: torch.relu(x) ** 2,
            jax.nn.gelu,
            "the candidate computes the tanh form of GELU; the reference computes the square of "
            "ReLU",
        ),
        (
            torch.relu,
            lambda x: jax.nn.relu(x) ** 2,
            "the candidate computes the square of ReLU; the reference computes ReLU",
        ),
    ],
)
def test_a_square_is_no_identity_times_what_it_is_a_square_of(function, own, expected):
    reference = Feed(function)
    found = diagnoses(
        reference, lambda p, x: own(x @ p["first.weight"].T) @ p["last.weight"].T, FLOATS
    )
    assert found == [expected]


class Decay(torch.nn.Module):
    """A state that decays by e to minus e to a weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = torch.nn.Linear(8, 8, bias=False)
        self.w = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        made = self.layer(x)
        rate, state, states = -torch.exp(self.w), torch.zeros_like(made[:, 0]), []
        for step in range(made.shape[1]):
            state = state * torch.exp(rate) + made[:, step]
            states.append(state)
        return torch.stack(states, 1)


def test_large_numbers_are_finite():
    def port(p, x):
        rate = jnp.exp(p["w"])

        def step(state, made):
            state = state * jnp.exp(rate) + made
            return state, state

        made = (x @ p["layer.weight"].T).swapaxes(0, 1)
        return jax.lax.scan(step, jnp.zeros_like(made[0]), made)[1].swapaxes(0, 1)

    found = diagnoses(Decay(), port, np.random.default_rng(0).normal(size=(2, 6, 8)))
    assert len(found) == 1
    assert "neg" in found[0], found


def test_a_tiny_number_that_is_added_is_not_missing():
    def function(m, x):
        return torch.nn.functional.layer_norm(m.layer(x), (8,), m.scale)

    def port(p, x):
        made = x @ p["layer.weight"].T + p["layer.bias"]
        centred = made - made.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + 1e-12) * p["scale"]

    reference = Linear(function, scale=RANDOM.normal(size=8))
    assert diagnoses(reference, port, FLOATS) == ["the number 1e-12 in add must be 1e-05"]


class Shares(torch.nn.Module):
    """The largest two weights of a softmax, made shares of their sum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = torch.nn.Linear(8, 4, bias=False)
        self.last = torch.nn.Linear(2, 8, bias=False)

    def forward(self, x):
        top, _ = torch.topk(self.gate(x).softmax(-1), 2)
        return self.last(top / top.sum(-1, keepdim=True))


def test_a_softmax_in_the_place_of_shares_is_no_other_reduction():
    def port(p, x):
        top, _ = jax.lax.top_k(jax.nn.softmax(x @ p["gate.weight"].T), 2)
        return jax.nn.softmax(top) @ p["last.weight"].T

    assert diagnoses(Shares(), port, FLOATS[0]) == [
        "the candidate computes a softmax along axis 1; the reference computes shares of the sum "
        "along axis 1"
    ]


class Cached(torch.nn.Module):
    """Two layers of attention, which return all keys beside what they make."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.q2, self.k2 = (torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, cache):
        keys = []
        for place, (query, key) in enumerate(((self.q, self.k), (self.q2, self.k2))):
            k = torch.cat([cache[place], key(x)], 1)
            x = x + (query(x) @ k.transpose(1, 2)).softmax(-1) @ k
            keys.append(k)
        return {"y": x, "k": torch.stack(keys)}


def _cached(slot, shift=0.0):
    """Returns a port that writes keys to a slot, and returns them all, shifted."""

    def linear(p, name, x):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def port(p, x, cache):
        keys = []
        for place, (query, key) in enumerate((("q", "k"), ("q2", "k2"))):
            k = jax.lax.dynamic_update_slice(cache[place], linear(p, key, x), (0, slot, 0))
            scores = linear(p, query, x) @ k.swapaxes(1, 2)
            x = x + jax.nn.softmax(jnp.where(jnp.arange(6) <= 4, scores, -1e30)) @ k
            keys.append(k[:, :5])
        return {"y": x, "k": jnp.stack(keys) + shift}

    return port


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_a_wrong_slot_of_a_cache_explains_the_cache_that_is_returned(shift):
    x, cache = RANDOM.normal(size=(2, 1, 8)), RANDOM.normal(size=(2, 2, 4, 8))
    padded = np.pad(cache, ((0, 0), (0, 0), (0, 2), (0, 0)))
    reference = Cached().double()
    arrays = {name: p.detach().numpy() for name, p in reference.named_parameters()}
    report = compare(reference, (_cached(3, shift), arrays), [x, cache], jax_inputs=[x, padded])
    found = [cause.diagnosis for cause in report.root_causes]
    assert found[0] == "the number 3 in dynamic_update_slice must be 4"
    # What is wrong with the result besides is not hidden.
    assert len(found) == (2 if shift else 1)


def test_a_number_that_only_need_be_large_is_no_diagnosis():
    def port(p, x):
        grown = 1 - jnp.exp(-jnp.arange(0, 16, 2) / 8)
        return (x @ p["layer.weight"].T + p["layer.bias"]) * grown

    reference = Linear(lambda m, x: m.layer(x))
    (found,) = diagnoses(reference, port, FLOATS)
    assert "10000" not in found
    assert found.endswith("comes in by mul: the reference has no such step")


class Windowed(torch.nn.Module):
    """Attention to two tokens on each side."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        places = torch.arange(x.shape[1])
        far = (places[:, None] - places).abs() > 2
        mask = torch.zeros(far.shape, dtype=x.dtype).masked_fill(far, -torch.inf)
        scores = self.q(x) @ self.k(x).transpose(1, 2) + mask
        return scores.softmax(-1) @ self.v(x)


def test_a_mask_that_is_forgotten_is_not_found_in_what_was_put_right():
    def port(p, x):
        q, k, v = (x @ p[f"{name}.weight"].T for name in "qkv")
        return jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v

    (found,) = diagnoses(Windowed(), port, RANDOM.normal(size=(2, 6, 8)))
    assert "the mask differs" in found
    assert "query 0 sees key 3" in found
