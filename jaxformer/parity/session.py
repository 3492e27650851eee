"""Two checkpoints side by side: opened, found to have the same architecture, run and judged.

This is what ``jaxformer verify`` does between reading its arguments and printing its result.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.errors import Setting, UsageError
from jaxformer.parity.comparison.generation import compare_generation
from jaxformer.parity.comparison.modules import compare
from jaxformer.parity.comparison.settings import compare_settings, precision_flags
from jaxformer.parity.comparison.training import compare_training
from jaxformer.parity.report.model import Report
from jaxformer.parity.report.text import one_line
from jaxformer.parity.repro.writer import write_repro
from jaxformer.parity.sources.checkpoints import (
    Source,
    check_same_architecture,
    dtype_names,
    in_rotary_layout_of,
    load_candidate,
    load_reference,
    padding_ids,
)
from jaxformer.parity.sources.tokens import (
    TextInput,
    chosen_length,
    random_tokens,
    text_tokens,
    vocabulary_size,
)

Mode = Literal["forward", "grad", "train", "generate"]
DEFAULT_STEPS, DEFAULT_TOKENS = 10, 20


class ParitySession:
    """Two loaded checkpoints and the tokens that both read.

    Args:
        source_a: the reference, run in PyTorch.
        source_b: the candidate, run in JAX.
        mode: what is compared.
        text: what both read; None for random tokens.
        seed: of random tokens.
        batch: B, the number of texts; default 1.
        length: T, the number of tokens of each; default 256, or as many as fit.

    Raises:
        CheckpointError: the architectures differ, or an array is damaged.
        UsageError: the models do not support the mode, more tokens are wanted than fit, or neither
            checkpoint has a tokenizer to read the text with.
        TextError: the text is too short, or holds what the tokenizer or the models do not know.
    """

    def __init__(
        self,
        source_a: Source,
        source_b: Source,
        *,
        mode: Mode,
        text: TextInput | None = None,
        seed: int = 0,
        batch: int | None = None,
        length: int | None = None,
    ):
        self.began = time.monotonic()
        check_same_architecture(source_a, source_b)
        source_b = in_rotary_layout_of(source_a, source_b)
        for source in (source_a, source_b):
            _check_mode(mode, source)
        self.mode = mode
        self.config = source_a.config
        self.reference_skeleton = source_a.plan.module
        self.context_length = min(s.config.context_length for s in (source_a, source_b))
        self.length = chosen_length(length, self.context_length)
        self.batch = batch or 1
        self.vocab_size = 0
        if isinstance(self.config, TransformerLMConfig):
            self.vocab_size = min(vocabulary_size(source) for source in (source_a, source_b))
        if text is not None:
            needed = self.batch * self.length + (mode == "train")
            tokens = text_tokens(text, needed, (source_a, source_b))
        self.reference = load_reference(source_a)
        self.candidate, candidate_note = load_candidate(source_b)
        if text is None:
            tokens = random_tokens(seed, padding_ids(self.reference.module))
        self.tokens = tokens
        self.about: dict[str, Any] = {
            "reference": f"{source_a.path}, {self.reference.note}, {dtype_names(source_a)}",
            "candidate": f"{source_b.path}, {candidate_note}, {dtype_names(source_b)}",
            "data": tokens.note,
        }

    def run(
        self,
        *,
        dtype: str | None = None,
        steps: int | None = None,
        tokens: int | None = None,
        dropout: bool = False,
    ) -> Report:
        """Runs both models in the session's mode and judges what differs.

        Args:
            dtype: under test, for forward and grad; default that of the candidate's weights.
            steps: of training; default 10.
            tokens: to generate; default 20.
            dropout: whether training drops units, the same on both sides.
        """
        if self.mode == "train":
            report, inputs = self._train(steps or DEFAULT_STEPS, dropout)
        elif self.mode == "generate":
            report, inputs = self._generate(tokens or DEFAULT_TOKENS)
        else:
            report, inputs = self._compare_modules(dtype)
        seconds = round(time.monotonic() - self.began, 1)
        return dataclasses.replace(
            report, about={**self.about, "inputs": inputs, "seconds": seconds}
        )

    def write_repro(self, folder: Path, report: Report) -> None:
        """Writes a folder that shows the first root cause of a report by itself.

        Raises:
            UsageError: what the module is called with cannot be written.
            ResourceError: the folder cannot be written.
        """
        first = report.root_causes[0]
        write_repro(
            folder,
            self.reference.module,
            self.candidate,
            self._inputs(),
            first.path,
            jax_call=_call_candidate,
            message=one_line(first.message),
            backward=self.mode == "grad",
        )

    def _compare_modules(self, dtype: str | None) -> tuple[Report, str]:
        inputs = self._inputs()
        report = compare(
            self.reference.module,
            self.candidate,
            inputs,
            backward=self.mode == "grad",
            dtype=dtype,
            torch_call=self.reference.call,
            jax_call=_call_candidate,
        )
        return report, " and ".join(f"{x.dtype} {x.shape}" for x in inputs)

    def _train(self, steps: int, dropout: bool) -> tuple[Report, str]:
        shape = self.batch, self.length

        def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
            count = self.batch * self.length
            ids = self.tokens.draw(step * count, count + 1, self.vocab_size)
            return ids[:-1].reshape(shape), ids[1:].reshape(shape)

        report = compare_training(
            self.reference.module, self.candidate, batch, steps=steps, dropout=dropout
        )
        return self._with_settings(report), f"{steps} batches of int64 {shape}"

    def _generate(self, tokens: int) -> tuple[Report, str]:
        tokens = min(tokens, self.context_length - 1)
        length = min(self.length, self.context_length - tokens)
        prompt = self.tokens.window(0, 1, length, self.vocab_size)
        report = compare_generation(self.reference.module, self.candidate, prompt, tokens=tokens)
        return self._with_settings(report), f"a prompt of {length} tokens, {tokens} to generate"

    def _with_settings(self, report: Report) -> Report:
        found = compare_settings(self.candidate, self.reference_skeleton) + precision_flags()
        return dataclasses.replace(report, settings=tuple(found))

    def _inputs(self) -> Sequence[np.ndarray]:
        """Returns ids (B, T); for an encoder and decoder, those of source and target."""
        if isinstance(self.config, TransformerLMConfig):
            return [self.tokens.window(0, self.batch, self.length, self.vocab_size)]
        # Different lengths, so that a mix-up of the two is found.
        lengths = self.length, max(1, self.length - self.length // 4)
        sizes = self.config.source_vocab_size, self.config.target_vocab_size
        return [
            self.tokens.window(place, self.batch, length, size)
            for place, (length, size) in enumerate(zip(lengths, sizes, strict=True))
        ]


def _call_candidate(module: Any, given: Sequence[Any]) -> Any:
    output = module(*given)
    if isinstance(module.config, TransformerLMConfig) and module.config.head.pooler:
        # The reference pools in the same call.
        module.pooled(output)
    return output


def _check_mode(mode: Mode, source: Source) -> None:
    """Checks that a model supports a mode.

    Raises:
        UsageError: it does not.
    """
    if mode not in ("train", "generate"):
        return
    config = source.config
    if isinstance(config, EncoderDecoderConfig):
        found = "an encoder and a decoder"
    elif config.head.head == "none":
        found = "a model without a head"
    elif mode == "generate" and not config.causal:
        found = "a model that sees later tokens"
    elif mode == "generate" and config.context_length < 2:
        found = "a model with a context of one token"
    else:
        return
    raise UsageError(
        Setting("mode"),
        f" {mode} needs a language model with a head, and {source.path} holds {found}: use ",
        Setting("mode"),
        " forward or grad",
    )
