"""Initial weights have the distributions of PyTorch, on both sides, as far as a draw can show.

Every bound below is what chance alone exceeds once in about two million draws: five standard errors
for a mean or a standard deviation, the same probability for an extreme or for the distance of two
distribution functions.
"""

import itertools
import math
from dataclasses import dataclass

import jax
import numpy as np
import pytest
import torch
from flax import nnx

import jaxformer.initializers
import torch_ref.initializers
from jaxformer.parameters import get_parameters
from jaxformer.porting import export_arrays
from parity_tests.harness import JAX, TORCH
from tests.support.tiers import full_except
from torch_ref.parameters import get_parameters as get_torch_parameters

CHANCE = math.erfc(5 / math.sqrt(2))
LAYERS = 3
MODEL = {
    "vocab_size": 210, "context_length": 180, "d_model": 96, "num_layers": LAYERS, "num_heads": 4,
    "head_dim": 20, "d_ff": 140, "tie_embeddings": False, "head_bias": True, "query_key_norm": True,
    "branch_output_norm": True, "num_token_types": 190, "head": "masked_lm", "causal": False,
    "pooler": True,
}  # fmt: skip
error_function = np.vectorize(math.erf, otypes=[float])
SCHEMES = ("gpt2", "torch", "xavier_uniform", "kaiming_uniform", "normal")


@dataclass(frozen=True)
class Uniform:
    """U(-bound, bound)."""

    bound: float

    @property
    def std(self) -> float:
        return self.bound / math.sqrt(3)

    kurtosis = 9 / 5

    def distribution(self, x):
        return np.clip((x / self.bound + 1) / 2, 0, 1)

    def check_extremes(self, x):
        # The share of the range that none of n draws enters is above ln(1/CHANCE) / n by chance.
        missed = math.log(1 / CHANCE) / x.size
        assert self.bound * (1 - missed) <= np.abs(x).max() <= self.bound * (1 + 1e-6)


@dataclass(frozen=True)
class Normal:
    """N(0, std²)."""

    std: float
    kurtosis = 3

    def distribution(self, x):
        return (1 + error_function(x / self.std / math.sqrt(2))) / 2

    def check_extremes(self, x):
        # Union bound: some of n draws is farther out with a probability of at most n · P(one is).
        farthest = np.abs(x).max() / self.std
        assert x.size * math.erfc(farthest / math.sqrt(2)) > CHANCE


def judge(x, law):
    """Whether the elements of x look drawn from the law."""
    x, n = np.sort(np.ravel(x).astype(np.float64)), x.size
    if not isinstance(law, Uniform | Normal):
        assert (x == law).all()
        return
    law.check_extremes(x)
    assert abs(x.mean()) <= 5 * law.std / math.sqrt(n)
    spread = math.sqrt((law.kurtosis - 1) / n)
    assert abs(np.mean(x**2) / law.std**2 - 1) <= 5 * spread
    expected = law.distribution(x)
    steps = np.arange(n + 1) / n
    distance = max((steps[1:] - expected).max(), (expected - steps[:-1]).max())
    assert distance <= kolmogorov_bound(n)


def judge_alike(x, y):
    """Whether x and y look drawn from one law: Kolmogorov and Smirnov's test of two samples."""
    x, y = np.sort(np.ravel(x).astype(np.float64)), np.sort(np.ravel(y).astype(np.float64))
    both = np.concatenate((x, y))
    shares = [np.searchsorted(z, both, side="right") / z.size for z in (x, y)]
    assert np.abs(shares[0] - shares[1]).max() <= kolmogorov_bound(x.size * y.size / both.size)


def kolmogorov_bound(n: float) -> float:
    """The distance d with 2·exp(-2·n·d²) = CHANCE, at or above its true probability."""
    return math.sqrt(math.log(2 / CHANCE) / (2 * n))


def parameters_of(side, build):
    """A fresh module's parameters by torch_ref's names and in its layout."""
    if side is JAX:
        return export_arrays(get_parameters(build(side)))
    torch.manual_seed(7)
    return get_torch_parameters(build(side))


def law_of(scheme, name, parameters):
    """What a parameter of a model is drawn from, by torch's documentation and GPT-2's paper."""
    owner, _, leaf = name.rpartition(".")
    place = owner.rpartition(".")[2]
    if "norm" in place:
        return 1.0 if leaf == "weight" else 0.0
    matrix = parameters[f"{owner}.weight"]
    fan_out, fan_in = matrix.shape
    if leaf == "bias":
        return Uniform(1 / math.sqrt(fan_in)) if scheme in ("torch", "xavier_uniform") else 0.0
    if scheme == "torch":
        return Normal(1) if "embedding" in place else Uniform(1 / math.sqrt(fan_in))
    if scheme == "gpt2" and place in ("o_proj", "down_proj"):
        return Normal(0.02 / math.sqrt(2 * LAYERS))
    return {
        "xavier_uniform": Uniform(math.sqrt(6 / (fan_in + fan_out))),
        "kaiming_uniform": Uniform(math.sqrt(6 / fan_in)),
    }.get(scheme, Normal(0.02))


@pytest.fixture(
    scope="module", params=full_except(SCHEMES, lambda scheme: scheme in ("torch", "gpt2"))
)
def scheme(request):
    return request.param


@pytest.fixture(scope="module")
def models(scheme):
    def build(side):
        config = side.config.TransformerLMConfig(**MODEL, initialization=scheme)
        return side.transformer_lm.TransformerLM(config, **side.init)

    return [parameters_of(side, build) for side in (JAX, TORCH)]


def test_every_parameter_of_a_model_follows_its_scheme(scheme, models):
    candidate, reference = models
    assert candidate.keys() == reference.keys()
    for parameters, name in itertools.product(models, candidate):
        judge(parameters[name], law_of(scheme, name, parameters))


@pytest.mark.parametrize("side", [JAX, TORCH], ids=["jax", "torch"])
def test_norms_and_the_bias_of_a_tied_head_stay_as_constructed(scheme, side):
    settings = {
        **MODEL, "norm": "rms_norm", "norm_unit_offset": True, "tie_embeddings": True,
        "initialization": scheme,
    }  # fmt: skip
    parameters = parameters_of(
        side,
        lambda s: s.transformer_lm.TransformerLM(
            s.config.TransformerLMConfig(**settings), **s.init
        ),
    )
    zero = [name for name in parameters if "norm" in name] + ["lm_head.bias"]
    assert len(zero) == LAYERS * 6 + 3
    assert "lm_head.weight" not in parameters
    for name in zero:
        assert (parameters[name] == 0).all(), name


def test_both_sides_draw_alike(models):
    candidate, reference = models
    for name in candidate:
        judge_alike(candidate[name], reference[name])


def test_no_two_parameters_are_the_same_draw(models):
    for parameters in models:
        drawn = [a for a in parameters.values() if a.std() > 0]
        assert len(drawn) > 10
        for one, other in itertools.combinations(drawn, 2):
            if one.size == other.size:
                correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1]
                assert abs(correlation) <= 5 / math.sqrt(one.size)


MODULES = {
    "linear": (lambda s: s.layers.Linear(320, 250, **s.init), {"weight": Uniform(320**-0.5)}),
    "linear-bias": (
        lambda s: s.layers.Linear(5, 60000, **s.init),
        {"weight": Uniform(5**-0.5), "bias": Uniform(5**-0.5)},
    ),
    "embedding": (lambda s: s.layers.Embedding(300, 270, **s.init), {"weight": Normal(1)}),
    "learned": (lambda s: s.positions.LearnedPositions(310, 270, **s.init), {"weight": Normal(1)}),
    "relative": (
        lambda s: s.positions.RelativePositions(150, 210, **s.init),
        {"weight": Normal(1)},
    ),
    "layer-norm": (lambda s: s.norms.LayerNorm(70), {"weight": 1.0, "bias": 0.0}),
    "rms-norm": (lambda s: s.norms.RMSNorm(70), {"weight": 1.0}),
    "rms-norm-unit-offset": (
        lambda s: s.norms.RMSNorm(70, unit_offset=True),
        {"weight": 0.0},
    ),
    "output-bias": (lambda s: s.heads.OutputBias(70), {"bias": 0.0}),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("side", [JAX, TORCH], ids=["jax", "torch"])
def test_what_constructors_draw(name, side):
    build, laws = MODULES[name]
    parameters = parameters_of(side, build)
    for leaf, law in laws.items():
        judge(parameters[leaf], law)


INITIALIZERS = {
    "uniform": (("uniform", 0.3), Uniform(0.3)),
    "normal": (("normal", 0.7), Normal(0.7)),
    "constant": (("constant", 0.4), 0.4),
    "xavier": (("xavier_uniform", 320, 250), Uniform(math.sqrt(6 / 570))),
    "kaiming": (("kaiming_uniform", 320), Uniform(math.sqrt(6 / 320))),
    "kaiming-slope": (("kaiming_uniform", 320, 0.2), Uniform(math.sqrt(6 / 1.04 / 320))),
}


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializers_by_themselves(name):
    (function, *arguments), law = INITIALIZERS[name]
    init = getattr(jaxformer.initializers, function)(*arguments)
    candidate = init(jax.random.key(3), (320, 250))
    generator = torch.Generator().manual_seed(3)
    init = getattr(torch_ref.initializers, function)(*arguments)
    reference = init(torch.empty(250, 320, dtype=torch.float64), generator).numpy()
    for x in (np.asarray(candidate), reference):
        judge(x, law)


@pytest.mark.parametrize(
    ("init", "law"),
    [
        (torch.nn.init.xavier_uniform_, Uniform(math.sqrt(6 / 570))),
        (torch.nn.init.kaiming_uniform_, Uniform(math.sqrt(6 / 320))),
        (lambda w: torch.nn.init.kaiming_uniform_(w, a=math.sqrt(5)), Uniform(320**-0.5)),
        (lambda w: torch.nn.init.kaiming_uniform_(w, a=0.2), Uniform(math.sqrt(6 / 1.04 / 320))),
    ],
)
def test_the_laws_are_those_of_torchs_own_functions(init, law):
    torch.manual_seed(1)
    judge(init(torch.empty(250, 320, dtype=torch.float64)).numpy(), law)


@pytest.mark.parametrize(
    ("drawn", "law"),
    [
        (Uniform(250**-0.5), Uniform(320**-0.5)),
        (Uniform(0.99), Uniform(1)),
        (Normal(0.98), Normal(1)),
        (Normal(1 / math.sqrt(3)), Uniform(1)),
        (Uniform(math.sqrt(3)), Normal(1)),
    ],
)
def test_a_wrong_fan_scale_or_shape_is_caught(drawn, law):
    random = np.random.default_rng(2)
    if isinstance(drawn, Uniform):
        x = random.uniform(-drawn.bound, drawn.bound, (320, 250))
    else:
        x = drawn.std * random.standard_normal((320, 250))
    judge(x, drawn)
    with pytest.raises(AssertionError):
        judge(x, law)
    shifted = x + 0.03 * drawn.std
    with pytest.raises(AssertionError):
        judge(shifted, drawn)


def test_two_samples_of_other_scales_are_caught():
    one, other = np.random.default_rng(4).standard_normal((2, 80000))
    judge_alike(one, other)
    with pytest.raises(AssertionError):
        judge_alike(one, 1.1 * other)


def test_seeds_give_other_weights_and_a_scheme_must_be_known():
    make = JAX.layers.Linear
    one, other = (make(6, 5, rngs=nnx.Rngs(seed)).kernel[...] for seed in (0, 1))
    assert (one != other).all()
    for module, side, extra in ((make(6, 5, rngs=nnx.Rngs(0)), JAX, (nnx.Rngs(0),)),
                                (TORCH.layers.Linear(6, 5), TORCH, ())):  # fmt: skip
        with pytest.raises(ValueError, match="unknown initialization 'he'"):
            side.initializers.initialize(module, "he", 1, *extra)
