"""Right ports in other layouts raise no alarm."""

import functools

import numpy as np
import pytest
import torch

from jaxformer.parity import compare
from tests.support.ports import layouts
from tests.support.ports.torch_models import GPT, Llama, ViT, perturbed

pytestmark = pytest.mark.usefixtures("settings_of_jax")

IDS = np.random.default_rng(0).integers(0, 50, (2, 13))
IMAGES = np.random.default_rng(0).normal(size=(2, 3, 12, 8)).astype(np.float32)
MODELS = {"gpt": GPT, "llama": Llama, "vit": ViT}
OPTIONS = {
    "gpt": layouts.GPT_OPTIONS,
    "llama": layouts.LLAMA_OPTIONS,
    "vit": layouts.VIT_OPTIONS,
}
# Ports of each model with random choices, beside those that differ in one from the plainest.
MIXED = {"gpt": 5, "llama": 6, "vit": 6}


def ports():
    """Returns models with the choices of a port."""
    random, found = np.random.default_rng(0), []
    for name, options in OPTIONS.items():
        found.append((name, {}))
        found += [(name, {key: choice}) for key in options for choice in options[key][1:]]
        for _ in range(MIXED[name]):
            one = name, {key: str(random.choice(options[key])) for key in options}
            found += [one] if one not in found else []
    return found


PORTS = ports()
# Of every model one, with many choices that are not the plainest.
FEW = (
    *([name for name, _ in PORTS].index(model) + 1 for model in MODELS),
    # A product in the place of a convolution, whose patches are no layout of the image.
    PORTS.index(("vit", {"patches": "product"})),
)


@functools.cache
def reference(name):
    """Returns a model whose numbers bfloat16 has, and its arrays by name."""
    torch.manual_seed(0)
    model = perturbed(MODELS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model, {n: np.asarray(t.detach()) for n, t in model.state_dict().items()}


def report_of(name, options):
    model, arrays = reference(name)
    arrays = {n: a for n, a in arrays.items() if n != "head.weight" or name != "gpt"}
    candidate = getattr(layouts, name)(arrays, **options)
    inputs, jax_inputs = IDS, [IDS]
    if name == "gpt":
        jax_inputs = layouts.gpt_inputs(IDS, options)
    elif name == "vit":
        inputs, jax_inputs = IMAGES, [IMAGES.transpose(0, 2, 3, 1)]
    return compare(model, candidate, inputs, jax_inputs=jax_inputs, backward=False)


def check(number):
    report = report_of(*PORTS[number])
    assert report.verdict == "rounding", f"{PORTS[number]}\n{report}"


@pytest.mark.parametrize("number", FEW)
def test_a_clean_port_raises_no_alarm(number):
    check(number)


@pytest.mark.tier("slow")
@pytest.mark.parametrize("number", range(len(PORTS)))
def test_no_clean_port_raises_an_alarm(number):
    check(number)
