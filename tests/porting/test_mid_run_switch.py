"""A run that changes framework in the middle stays on the curve of one that does not."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from jaxformer.config import OptimizerConfig
from jaxformer.errors import CheckpointError, UsageError
from jaxformer.parameters import get_parameters, split
from jaxformer.porting import from_torch, train_state_from_torch, train_state_to_torch
from jaxformer.train_step import TrainState, train_step
from parity_tests.families import encdec
from tests.support.tiers import full_after

pytestmark = pytest.mark.usefixtures("float64")

STEPS, SWITCH = 200, 100
OPTIMIZER = OptimizerConfig(
    learning_rate=3e-3, warmup_steps=20, decay_steps=STEPS, clip_norm=0.7, weight_decay=0.1
)
VOCAB, LENGTH, BATCH = 29, 18, 5


def gpt2():
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=24, n_head=3, n_layer=2, n_positions=LENGTH,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def gpt():
    return encdec.GPT(VOCAB, d_model=24, num_heads=3, num_layers=2, d_ff=40, max_len=LENGTH,
                      dropout=0.0)  # fmt: skip


MODELS = {"gpt2": gpt2, "encdec": gpt}


def new_model(dialect):
    torch.manual_seed(0)
    return MODELS[dialect]().double().train()


def new_optimizer(model, **settings):
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
    return torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=OPTIMIZER.eps, **settings)


def batch(step):
    """Tokens that follow one another by a rule, with noise: there is something to learn."""
    rng = np.random.default_rng(step)
    first = rng.integers(0, VOCAB, (BATCH, 1))
    tokens = (first + 3 * np.arange(LENGTH + 1) + (rng.random((BATCH, LENGTH + 1)) < 0.1)) % VOCAB
    return tokens[:, :-1], tokens[:, 1:]


def rate(step):
    """The schedule of a PyTorch user's own loop."""
    if step < OPTIMIZER.warmup_steps:
        return OPTIMIZER.learning_rate * (step + 1) / (OPTIMIZER.warmup_steps + 1)
    share = (step - OPTIMIZER.warmup_steps) / (STEPS - OPTIMIZER.warmup_steps)
    low, high = OPTIMIZER.min_learning_rate, OPTIMIZER.learning_rate
    return low + 0.5 * (1 + math.cos(math.pi * share)) * (high - low)


def run_torch(model, optimizer, steps):
    losses = []
    for step in steps:
        inputs, targets = (torch.as_tensor(a) for a in batch(step))
        logits = model(inputs)
        logits = getattr(logits, "logits", logits)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_jax(module, state, steps):
    step = jax.jit(functools.partial(train_step, definition=split(module)[0], optimizer=OPTIMIZER))
    losses = []
    for number in steps:
        state, metrics = step(state, tuple(a[None] for a in batch(number)), None)
        losses.append(float(metrics["train_loss"]))
    return state, losses


@functools.cache
def all_in_torch(dialect):
    model = new_model(dialect)
    return run_torch(model, new_optimizer(model), range(STEPS))


@functools.cache
def all_in_jax(dialect):
    module = from_torch(new_model(dialect), dialect)
    state = TrainState.create(get_parameters(module), OPTIMIZER)
    return run_jax(module, state, range(STEPS))[1]


@pytest.mark.parametrize("dialect", full_after(1, MODELS))
def test_torch_then_jax(dialect):
    model = new_model(dialect)
    optimizer = new_optimizer(model)
    losses = run_torch(model, optimizer, range(SWITCH))
    module, state = train_state_from_torch(model, optimizer, OPTIMIZER, dialect=dialect)
    assert int(state.step) == SWITCH
    losses += run_jax(module, state, range(SWITCH, STEPS))[1]
    assert losses[-1] < 0.6 * losses[0]
    np.testing.assert_allclose(losses, all_in_torch(dialect), rtol=1e-9)
    np.testing.assert_allclose(losses, all_in_jax(dialect), rtol=1e-9)


@pytest.mark.tier("full")
@pytest.mark.parametrize("dialect", full_after(1, reversed(MODELS)))
def test_jax_then_torch(dialect):
    module = from_torch(new_model(dialect), dialect)
    state = TrainState.create(get_parameters(module), OPTIMIZER)
    state, losses = run_jax(module, state, range(SWITCH))
    torch.manual_seed(1)
    model = MODELS[dialect]().double().train()
    optimizer = new_optimizer(model)
    weights, moments = train_state_to_torch(module, state, model, optimizer)
    model.load_state_dict({name: torch.as_tensor(array) for name, array in weights.items()})
    optimizer.load_state_dict(moments)
    losses += run_torch(model, optimizer, range(SWITCH, STEPS))
    np.testing.assert_allclose(losses, all_in_torch(dialect), rtol=1e-9)
    np.testing.assert_allclose(losses, all_in_jax(dialect), rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_moments_keep_every_bit(dtype):
    model = new_model("gpt2").to(dtype)
    optimizer = new_optimizer(model)
    run_torch(model, optimizer, range(3))
    module, state = train_state_from_torch(model, optimizer, OPTIMIZER)
    _, back = train_state_to_torch(module, state, model, optimizer)
    before = optimizer.state_dict()
    assert back["param_groups"] == before["param_groups"]
    assert back["state"].keys() == before["state"].keys()
    for place, entry in before["state"].items():
        for name, value in entry.items():
            assert torch.equal(back["state"][place][name], value), (place, name)
            assert back["state"][place][name].dtype == value.dtype


def test_an_optimizer_before_its_first_step_starts_from_zero():
    model = new_model("gpt2")
    _, state = train_state_from_torch(model, new_optimizer(model), OPTIMIZER)
    assert int(state.step) == 0


def test_moments_of_one_group_go_by_the_order_of_the_parameters():
    model = new_model("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.0)
    run_torch(model, optimizer, range(2))
    module, state = train_state_from_torch(model, optimizer.state_dict(), WITHOUT_DECAY)
    _, back = train_state_to_torch(module, state, model, optimizer)
    for place, entry in optimizer.state_dict()["state"].items():
        assert torch.equal(back["state"][place]["exp_avg"], entry["exp_avg"])


BETAS = OPTIMIZER.beta1, OPTIMIZER.beta2
WITHOUT_DECAY = dataclasses.replace(OPTIMIZER, weight_decay=0.0)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_an_optimizer_with_its_parameters_in_any_order(kind):
    """They are known by identity: each layer keeps its own moments."""
    model = new_model("gpt2")
    parameters = reversed([*model.parameters()])
    optimizer = kind(parameters, lr=1e-3, betas=BETAS, weight_decay=0.0)
    losses = run_torch(model, optimizer, range(3))
    module, state = train_state_from_torch(model, optimizer, WITHOUT_DECAY)
    step = jax.jit(
        functools.partial(train_step, definition=split(module)[0], optimizer=WITHOUT_DECAY)
    )
    _, metrics = step(state, tuple(a[None] for a in batch(3)), None)
    _, back = train_state_to_torch(module, state, model, optimizer)
    for place, entry in optimizer.state_dict()["state"].items():
        assert torch.equal(back["state"][place]["exp_avg"], entry["exp_avg"])
    losses = run_torch(model, optimizer, range(3, 4))
    np.testing.assert_allclose(float(metrics["train_loss"]), losses[0], rtol=1e-12)


def test_settings_of_the_optimizer_that_the_run_has_not_are_named():
    model = new_model("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    with pytest.warns(UserWarning, match="this run has") as caught:
        train_state_from_torch(model, optimizer, OPTIMIZER)
    assert [str(one.message) for one in caught] == [
        "the optimizer had beta2 0.95, this run has 0.99",
        "the optimizer had weight_decay 0, this run has 0.1",
    ]


def test_another_learning_rate_is_named():
    model = new_model("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=BETAS, weight_decay=0.0)
    logits = model(torch.zeros(1, 3, dtype=torch.int64)).logits
    logits.sum().backward()
    optimizer.step()
    constant = dataclasses.replace(WITHOUT_DECAY, schedule="constant", warmup_steps=0)
    with pytest.warns(UserWarning, match="learning_rate 0.0003 after 1 steps, this run has 0.003"):
        train_state_from_torch(model, optimizer, constant)
    train_state_from_torch(model, optimizer, dataclasses.replace(constant, learning_rate=3e-4))


@pytest.mark.parametrize(
    "wrap", [torch.nn.DataParallel, lambda m: torch.compile(m, backend="eager")]
)
def test_weights_have_the_names_of_a_wrapped_model(wrap):
    model = wrap(new_model("gpt2").to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.0)
    module, state = train_state_from_torch(model, optimizer, WITHOUT_DECAY)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights, moments = train_state_to_torch(module, state, model, optimizer)
    model.load_state_dict({name: torch.as_tensor(value) for name, value in weights.items()})
    optimizer.load_state_dict(moments)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parameters_that_the_optimizer_does_not_have_are_named():
    model = new_model("gpt2")
    model.transformer.wpe.weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=BETAS, weight_decay=0.0)
    with pytest.raises(
        CheckpointError,
        match=r"holds 27 parameters and the model 28, without transformer.wpe.weight: .* alone",
    ):
        train_state_from_torch(model, optimizer, WITHOUT_DECAY)


def test_the_steps_of_sgd_are_given():
    model = new_model("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run_torch(model, optimizer, range(2))
    config = dataclasses.replace(WITHOUT_DECAY, optimizer="sgd")
    assert train_state_from_torch(model, optimizer, config, steps=2)[1].step == 2
    with pytest.raises(CheckpointError, match=r"how many steps it has made: give them with steps$"):
        train_state_from_torch(model, optimizer, config)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam])
def test_variants_of_adam_are_no_adamw(kind):
    model = new_model("gpt2")
    optimizer = kind(model.parameters(), weight_decay=0.0, decoupled_weight_decay=True)
    with pytest.raises(UsageError, match=f"got {kind.__name__}$"):
        train_state_from_torch(model, optimizer, WITHOUT_DECAY)


def test_an_optimizer_of_another_model_or_kind_is_rejected():
    model, other = new_model("gpt2"), new_model("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.0)
    with pytest.raises(UsageError, match="none of the model's"):
        train_state_from_torch(other, optimizer, WITHOUT_DECAY)
    module, state = train_state_from_torch(model, optimizer, WITHOUT_DECAY)
    with pytest.raises(UsageError, match=r"the optimizer is SGD, .* it has mu, nu"):
        train_state_to_torch(module, state, model, torch.optim.SGD(model.parameters()))


def broken_shape(state):
    state["state"][3]["exp_avg"] = torch.zeros(2, 3, dtype=torch.float64)


def broken_step(state):
    state["state"][3]["step"] = torch.tensor(7.0)


def broken_missing(state):
    del state["state"][3]


def broken_amsgrad(state):
    state["param_groups"][0]["amsgrad"] = True


def broken_decay(state):
    state["param_groups"][1]["weight_decay"] = 0.1


def broken_count(state):
    state["param_groups"][1]["params"].pop()


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (broken_shape, CheckpointError, "exp_avg of .* has shape"),
        (broken_step, CheckpointError, "different numbers of steps"),
        (broken_missing, CheckpointError, "no state of"),
        (broken_amsgrad, UsageError, "amsgrad"),
        (broken_decay, UsageError, "decay"),
        (broken_count, CheckpointError, "holds 27 parameters and the model 28"),
    ],
)
def test_what_does_not_fit_is_refused(damage, error, words):
    model = new_model("gpt2")
    optimizer = new_optimizer(model)
    run_torch(model, optimizer, range(1))
    state = optimizer.state_dict()
    state = {
        "state": {k: dict(v) for k, v in state["state"].items()},
        "param_groups": [{**g, "params": list(g["params"])} for g in state["param_groups"]],
    }
    damage(state)
    with pytest.raises(error, match=words):
        train_state_from_torch(model, state, OPTIMIZER, dialect="gpt2")


def test_an_argument_of_another_kind_is_named():
    model = new_model("gpt2")
    optimizer = new_optimizer(model)
    for given, message in (
        ((model, 3, OPTIMIZER), "optimizer must be an optimizer of PyTorch or its state dict"),
        ((model.state_dict(), optimizer, OPTIMIZER), "model must be a torch.nn.Module: got"),
        ((model, optimizer, {}), "config must be an OptimizerConfig: got dict"),
    ):
        with pytest.raises(UsageError, match=message):
            train_state_from_torch(*given)
    with pytest.raises(CheckpointError, match="state is not as PyTorch has it"):
        train_state_from_torch(model, {"state": {}, "param_groups": [3]}, OPTIMIZER)
    with pytest.raises(UsageError, match="state must be a TrainState: got dict"):
        train_state_to_torch(None, {}, model, optimizer)
    with pytest.raises(UsageError, match="optimizer must be an optimizer of PyTorch: got dict"):
        train_state_to_torch(None, {}, model, optimizer.state_dict())
