"""The order of parameters by which a PyTorch optimizer counts, whatever file they came from."""

import dataclasses

import pytest
import torch
import transformers

from jaxformer.porting.checkpoint import open_checkpoint
from jaxformer.porting.dialects.common.transformers_types import TRANSFORMERS_TYPES
from jaxformer.porting.mapping.optimizer_state import OptimizerState, write_optimizer
from jaxformer.porting.parameter_order import parameter_order, sort_parameters
from jaxformer.porting.targets import PortTarget, plan_target
from tests.support.hugging_face.building import build_case
from tests.support.hugging_face.cases import CASES
from tests.support.tiers import full_except

FIRST = {case.dialect: name for name, case in reversed(CASES.items())}
SIZES = {"hidden_size": 8, "intermediate_size": 10, "num_attention_heads": 2, "vocab_size": 11}
DEEP = {
    "gpt2": {"n_embd": 6, "n_head": 2, "n_layer": 12, "n_positions": 7, "vocab_size": 11},
    "llama": {**SIZES, "num_key_value_heads": 1, "num_hidden_layers": 11},
    "t5": {
        "d_model": 6, "d_kv": 3, "d_ff": 10, "num_heads": 2, "num_layers": 11,
        "num_decoder_layers": 2, "vocab_size": 11,
    },
    "bert": {**SIZES, "num_hidden_layers": 11},
    "mixtral": {**SIZES, "num_hidden_layers": 2, "num_local_experts": 11},
}  # fmt: skip


@pytest.mark.parametrize("name", full_except(CASES, lambda name: name in FIRST.values()))
def test_the_table_has_the_order_of_every_class(name):
    model = build_case(CASES[name])
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    order = TRANSFORMERS_TYPES[CASES[name].dialect].order
    assert sort_parameters(sorted(names), order) == names


def exported_order(path, *, is_run=False):
    """The export to a PyTorch file, and the order of its parameters as far as it is known."""
    checkpoint = open_checkpoint(path)
    imported = checkpoint.plan()
    target = PortTarget(path / "out.pt", "torch", (), dialect=imported.origin.dialect.name)
    if is_run:
        origin = dataclasses.replace(imported.origin, is_published=False)
        imported = dataclasses.replace(imported, origin=origin)
    exported = plan_target(imported, target, {})
    return exported, parameter_order(exported, checkpoint.known_order(imported), {})


@pytest.mark.parametrize("is_sorted", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "t5", "bert"])
def test_optimizers_count_as_the_model_does(empty_folder, model_type, is_sorted):
    config = transformers.AutoConfig.for_model(model_type, **DEEP[model_type])
    kind = getattr(transformers, TRANSFORMERS_TYPES[model_type].classes[0])
    model = kind(config)
    model.save_pretrained(empty_folder)
    if not is_sorted:
        (empty_folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), empty_folder / "pytorch_model.bin")
    exported, order = exported_order(empty_folder)
    state = write_optimizer(OptimizerState({}, 3), exported, order)
    named = dict(model.named_parameters())
    decays, others = state["param_groups"]
    assert decays["param_names"] == [n for n, p in named.items() if p.ndim >= 2]
    assert others["param_names"] == [n for n, p in named.items() if p.ndim < 2]


def test_the_order_of_arrays_that_the_class_does_not_have_is_not_known(empty_folder):
    config = transformers.MixtralConfig(**DEEP["mixtral"], num_key_value_heads=1)
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(empty_folder)
    assert exported_order(empty_folder)[1] is None
    # A run is exported with the arrays of the class.
    assert exported_order(empty_folder, is_run=True)[1] == [n for n, _ in model.named_parameters()]
