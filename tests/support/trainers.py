"""Folders of transformers' Trainer."""

import json
import math

import torch
from transformers import Trainer, TrainingArguments

from jaxformer.config import OptimizerConfig
from jaxformer.porting import train_state_from_torch
from jaxformer.training.state_arrays import moments_of


def trainer_of(model, **settings):
    """Returns a Trainer whose optimizer has made one step, with random gradients."""
    trainer = Trainer(model, TrainingArguments("unused", report_to=[], use_cpu=True, **settings))
    optimizer = trainer.create_optimizer()
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return trainer


def save_trainer(trainer, folder, step=1):
    """Writes what the Trainer writes in mid-run."""
    trainer.model.save_pretrained(folder)
    torch.save(trainer.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": step}, folder / "scheduler.pt")
    state = {"global_step": step, "log_history": [{"loss": math.nan, "step": step}]}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def moments_by_name(model, optimizer):
    """Returns jaxformer's moments of an optimizer that knows each of its parameters."""
    (rate,) = {group["lr"] for group in optimizer.param_groups}
    config = OptimizerConfig(
        learning_rate=rate, schedule="constant", warmup_steps=0, beta2=0.999, weight_decay=0.0
    )
    _, state = train_state_from_torch(model, optimizer, config)
    return moments_of(state.optimizer_state)


def are_equal(stored, moments):
    """Returns whether the moments of a file have the same names and bits as others."""
    return stored.keys() == moments.keys() and all(
        found.keys() == moments[kind].keys()
        and all((found[name].read() == array).all() for name, array in moments[kind].items())
        for kind, found in stored.items()
    )
