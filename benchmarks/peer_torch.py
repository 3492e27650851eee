"""Sides of benchmarks/peers.py that run in PyTorch: a plain program, and transformers."""

import functools
import os
from typing import Any

import numpy as np
from peer_models import GrowingCache, StaticCache, plain_gpt
from peer_sides import Side, Task


class Torch(Side):
    """A plain PyTorch program, eager or compiled."""

    def __init__(self, task: Task, *, compiles: bool = False):
        import torch

        super().__init__(task)
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.manual_seed(task.config.seed)
        self.compiles = compiles
        self.model = self.make_model()
        settings = task.config.optimizer
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2]},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=settings.learning_rate, betas=(settings.beta1, settings.beta2),
            eps=settings.eps, weight_decay=settings.weight_decay, fused=True,
        )  # fmt: skip
        self.loss = torch.compile(self.loss_of) if compiles else self.loss_of
        self.next_logits = self.model.next_logits if hasattr(self.model, "next_logits") else None
        if compiles:
            self.next_logits = torch.compile(self.next_logits, dynamic=False)

    def make_model(self) -> Any:
        """Returns the model with its first weights."""
        return plain_gpt(self.task.config.model, self.task.weights)

    def loss_of(self, inputs: Any, targets: Any) -> Any:
        """Returns the mean loss."""
        return self.model(inputs, targets)

    def _batches(self, starts: np.ndarray) -> Any:
        import torch

        inputs, targets = (torch.from_numpy(a).long() for a in self.task.windows(starts))
        return zip(inputs, targets, strict=True)

    def train(self, starts: np.ndarray) -> float:
        import torch

        self.model.train()
        for inputs, targets in self._batches(starts):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss(inputs, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.task.config.optimizer.clip_norm
            )
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def evaluate(self, starts: np.ndarray) -> float:
        import torch

        self.model.eval()
        with torch.inference_mode():
            return sum(self.loss(*batch) for batch in self._batches(starts)).item() / len(starts)

    def write(self, prompt: np.ndarray, count: int) -> np.ndarray:
        import torch

        self.model.eval()
        config = self.task.config.model
        ids = torch.from_numpy(prompt).long()
        batch, length = ids.shape
        slots = length + count
        with torch.inference_mode():
            caches: list[Any] = []
            for _ in range(config.num_layers):
                empty = GrowingCache(config, batch, slots)
                caches.append(StaticCache(empty.keys, empty.values) if self.compiles else empty)
            assert self.next_logits is not None
            written, positions = [], torch.arange(length)
            for i in range(count):
                ids = self.next_logits(ids, caches, positions).argmax(-1, keepdim=True)
                written.append(ids)
                positions = torch.tensor([length + i])
            return torch.cat(written, dim=1).numpy()

    def reset(self) -> None:
        self.optimizer = None
        self.model.load_state_dict(self.make_model().state_dict())


class Transformers(Torch):
    """transformers' GPT-2, with its own cache, or with its static one and compiled."""

    def make_model(self) -> Any:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        config = self.task.config.model
        if self.compiles:
            self.train = self.evaluate = functools.partial(Side.train, self)  # type: ignore
        made = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=config.vocab_size, n_positions=config.context_length,
                n_embd=config.d_model, n_layer=config.num_layers, n_head=config.attention.num_heads,
                activation_function=(
                    "gelu_new" if config.feed_forward.activation == "gelu_tanh" else "gelu"
                ),
                embd_pdrop=config.embedding.embedding_dropout,
                attn_pdrop=config.attention.attention_dropout,
                resid_pdrop=config.attention.output_dropout,
                bos_token_id=None, eos_token_id=None, pad_token_id=0,
            )
        )  # fmt: skip
        # Biases that the preset does not have stay at zero, and are not trained.
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
            plain = plain_gpt(config, self.task.weights).state_dict()
            given = {_gpt2_name(name): array for name, array in plain.items()}
            own = made.state_dict()
            for name, array in given.items():
                is_conv1d = array.ndim == 2 and "transformer.h." in name
                own[name].copy_(array.T if is_conv1d else array)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name in given)
        return made

    def loss_of(self, inputs: Any, targets: Any) -> Any:
        from torch.nn import functional

        logits = self.model(inputs, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def write(self, prompt: np.ndarray, count: int) -> np.ndarray:
        import torch
        from transformers import CompileConfig

        self.model.eval()
        ids, more = torch.from_numpy(prompt).long(), {}
        if self.compiles:
            compiling = CompileConfig(mode="default")
            compiling._compile_all_devices = True  # generate() compiles on GPUs alone otherwise
            more = {"cache_implementation": "static", "compile_config": compiling}
        with torch.inference_mode():
            whole = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                use_cache=True, **more,
            )  # fmt: skip
        return whole[:, prompt.shape[1] :].numpy()


def _gpt2_name(name: str) -> str:
    """Returns transformers' name of a parameter of ``plain_gpt``."""
    parts = {
        "tokens": "wte", "positions": "wpe", "blocks": "h", "attention_norm": "ln_1",
        "attention": "attn", "qkv": "c_attn", "out": "c_proj", "feed_forward_norm": "ln_2",
        "feed_forward": "mlp", "up": "c_fc", "down": "c_proj", "norm": "ln_f",
    }  # fmt: skip
    return "transformer." + ".".join(parts.get(part, part) for part in name.split("."))
