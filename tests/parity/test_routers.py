"""The parity debugger names a wrong router, wrong experts, missing sinks, and nothing else."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxformer.config import TransformerLMConfig
from jaxformer.parameters import get_parameters
from jaxformer.parity import compare
from jaxformer.parity.sources.checkpoints import make_twin
from jaxformer.porting import export_arrays
from jaxformer.transformer_lm import TransformerLM
from tests.support.hugging_face.folders import round_trip
from tests.support.hugging_face.proof import Proof
from tests.support.mutants import replace_methods
from tests.support.tiers import SLOW, full_except
from tests.support.verified import changed, verify

pytestmark = pytest.mark.usefixtures("float64")

SIZES = {
    "vocab_size": 37, "d_model": 20, "num_heads": 4, "head_dim": 6, "num_layers": 2,
    "context_length": 23, "positions": "rotary", "norm": "rms_norm", "initialization": "torch",
    "expert_d_ff": 14,
}  # fmt: skip
CONFIGS = {
    "softmax": TransformerLMConfig(
        **SIZES, activation="swiglu", num_experts=5, experts_per_token=3, shared_expert_d_ff=11,
        shared_expert_gate=True,
    ),
    "sigmoid": TransformerLMConfig(
        **SIZES, activation="swiglu", num_experts=12, experts_per_token=3, router="sigmoid",
        expert_weight_scale=2.5, choice_bias=True, expert_groups=4, groups_per_token=2,
        shared_expert_d_ff=11, dense_layers=(0,),
    ),
    "chosen": TransformerLMConfig(
        **SIZES, activation="clamped_swiglu", swiglu_limit=0.4, num_experts=5, experts_per_token=3,
        router="softmax_of_chosen", router_bias=True, attention_sinks=True,
    ),
}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 37, (3, 23))
ROUTER, EXPERTS = "blocks.1.feed_forward.router", "blocks.1.feed_forward"


def sides(config):
    """Both sides of a model, with the same weights, none of which is where it began."""
    candidate = TransformerLM(config, rngs=nnx.Rngs(0))
    random = np.random.default_rng(1)
    weights = {
        name: np.asarray(value, np.float64) + 0.2 * random.standard_normal(value.shape)
        for name, value in get_parameters(candidate).items()
    }
    nnx.update(candidate, nnx.from_flat_state(_state(candidate, weights)))
    reference = make_twin(config).double()
    reference.load_state_dict({n: torch.as_tensor(a) for n, a in export_arrays(weights).items()})
    return reference.eval(), candidate


def _state(candidate, weights):
    flat = nnx.to_flat_state(nnx.state(candidate, nnx.Param))
    return [(path, v.replace(jnp.asarray(weights[".".join(map(str, path))]))) for path, v in flat]


def part_of(candidate, path):
    for name in path.split("."):
        candidate = candidate[int(name)] if name.isdigit() else getattr(candidate, name)
    return candidate


def setting(path, **values):
    """A fault: other settings of a module."""

    def mutate(candidate):
        for name, value in values.items():
            assert getattr(part_of(candidate, path), name) != value
            setattr(part_of(candidate, path), name, value)

    return mutate


def method(path, **methods):
    """A fault: other methods of a module."""
    return lambda candidate: replace_methods(part_of(candidate, path), **methods)


def without(path, name):
    """A fault: a module runs without one of its parts."""

    def call(original, self, *args, **kwargs):
        part = getattr(self, name)
        setattr(self, name, None)
        try:
            return original(*args, **kwargs)
        finally:
            setattr(self, name, part)

    return method(path, __call__=call)


def other_experts(routing):
    """The choice of a router, in which each expert is its neighbour."""
    return routing._replace(experts=(routing.experts + 1) % 5)


FAULTS = {
    "weights are not normalised": ("softmax", setting(ROUTER, normalize_weights=False), ROUTER),
    "weights are not scaled": ("sigmoid", setting(ROUTER, weight_scale=1.0), ROUTER),
    "a softmax for a sigmoid": ("sigmoid", setting(ROUTER, kind="softmax"), ROUTER),
    "groups are not chosen first": ("sigmoid", setting(ROUTER, groups_per_token=4), ROUTER),
    "what counts for the choice is left out": (
        "sigmoid", method(ROUTER, _for_choice=lambda original, self, scores: scores), ROUTER
    ),
    "a softmax over all before the choice": (
        "chosen", setting(ROUTER, kind="softmax", normalize_weights=False), ROUTER
    ),
    "other experts with the same weights": (
        "softmax", method(ROUTER, __call__=lambda call, self, x: other_experts(call(x))), ROUTER
    ),
    "the shared expert goes without its gate": (
        "softmax", without(EXPERTS, "shared_expert_gate"), EXPERTS
    ),
    "the shared expert's gate is no sigmoid's": (
        "softmax",
        method(f"{EXPERTS}.shared_expert_gate", __call__=lambda call, self, x: 2 * call(x)),
        f"{EXPERTS}.shared_expert_gate",
    ),
    "the gate is not clamped": ("chosen", setting(EXPERTS, clamp=(1.702, 1e6)), EXPERTS),
    "the gate has another slope": ("chosen", setting(EXPERTS, clamp=(1.0, 0.4)), EXPERTS),
    "sinks are left out": (
        "chosen", without("blocks.1.attention", "sinks"), "blocks.1.attention"
    ),
}  # fmt: skip


@pytest.mark.tier("full")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_router_or_expert_is_named_and_nothing_else(fault):
    name, mutate, path = FAULTS[fault]
    reference, candidate = sides(CONFIGS[name])
    mutate(candidate)
    report = compare(reference, candidate, [IDS], backward=False)
    assert report.verdict == "bug"
    assert [node.path for node in report.root_causes] == [path]


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", CONFIGS)
def test_right_routers_are_equal(name):
    assert compare(*sides(CONFIGS[name]), [IDS]).verdict == "rounding"


# Of folders of transformers a router is compared together with the experts around it.
SETTINGS = {
    "mixtral": ({"normalize_expert_weights": False}, "blocks.0.feed_forward"),
    "qwen2_moe": ({"normalize_expert_weights": True}, "blocks.1.feed_forward"),
    "deepseek_v3": ({"expert_weight_scale": 1.0}, "blocks.1.feed_forward"),
    "gpt_oss": ({"swiglu_limit": 0.5}, "blocks.0.feed_forward"),
    "t5": ({"max_bucket_distance": 40}, "encoder"),
}
IN_FULL = ("mixtral",)


@pytest.mark.parametrize(
    "name", full_except(full_except(SETTINGS, lambda n: n in IN_FULL, SLOW), lambda n: False)
)
def test_verify_names_what_another_setting_changes(name, tmp_path):
    settings, path = SETTINGS[name]
    trip = round_trip(Proof(name), tmp_path)
    wrong = changed(trip.file, tmp_path / "wrong.safetensors", config=settings)
    few = ("--mode", "forward", "--length", 64)
    assert verify(trip.folder, trip.file, *few)[0] == 0
    code, lines = verify(trip.folder, wrong, *few)
    assert code == 1
    assert lines[-1].startswith(f"bug: {path} ") or lines[-1].startswith(f"bug: {path}."), lines
