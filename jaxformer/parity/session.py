"""Two checkpoints side by side: opened, found to have the same architecture, run and judged.

This is what ``jaxformer verify`` does between reading its arguments and printing its result.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

import jaxformer
from jaxformer.config import TransformerLMConfig
from jaxformer.errors import Setting, UsageError
from jaxformer.parity.comparison.generation import compare_generation
from jaxformer.parity.comparison.language_models import padding_ids, unsuitable
from jaxformer.parity.comparison.modules import compare
from jaxformer.parity.comparison.training import compare_training
from jaxformer.parity.diagnosis.settings import compare_settings, precision_flags
from jaxformer.parity.recording.reference_modules import modules_of
from jaxformer.parity.recording.whole_models import call_candidate
from jaxformer.parity.report.report import Report
from jaxformer.parity.report.text import one_line
from jaxformer.parity.repro.writer import write_repro
from jaxformer.parity.sources.checkpoints import (
    LoadedReference,
    Source,
    call_reference,
    check_same_architecture,
    describe_candidate,
    dtype_names,
    load_candidate,
    load_reference,
)
from jaxformer.parity.sources.inputs import InputSource, drawn_instead_of_text
from jaxformer.parity.sources.same_form import in_rotary_layout_of, with_head_of
from jaxformer.parity.sources.tokens import (
    TextInput,
    chosen_length,
    random_tokens,
    text_tokens,
    vocabulary_size,
)
from jaxformer.parity.streaming.choice import Streaming, choose
from jaxformer.parity.streaming.empty_reference import EmptyReference
from jaxformer.parity.streaming.layout import CannotStreamError, Layout, find_layout
from jaxformer.parity.streaming.session import Progress, StreamedComparison
from jaxformer.parity.streaming.state import State, default_folder, describe_files
from jaxformer.porting.formats.tensors import digest
from jaxformer.porting.mapping.abstract_modules import parameter_shapes
from jaxformer.porting.mapping.plans import as_class

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
        streaming: whether the models are compared block by block; see ``parity.streaming``.
        progress: called with the number of finished parts, and of all, of such a comparison.

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
        streaming: Streaming | None = None,
        progress: Progress = lambda done, total: None,
    ):
        self.began = time.monotonic()
        source_b = with_head_of(source_a, source_b)
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
        drawn = drawn_instead_of_text(self.config)
        if text is not None and drawn:
            raise UsageError(
                f"{source_a.path} reads {drawn}: they are drawn at random, and no text"
            )
        if text is not None:
            needed = self.batch * self.length + (mode == "train")
            tokens = text_tokens(text, needed, (source_a, source_b))
        self.sources = (source_a, source_b)
        self.streaming, self.progress = streaming or Streaming(), progress
        is_streamed, how = choose(self.streaming.wanted, mode, source_a)
        self.streamed: tuple[EmptyReference, Layout] | None = None
        if is_streamed:
            try:
                self.streamed = self._open_streamed()
            except CannotStreamError as error:
                if self.streaming.wanted == "always":
                    raise CannotStreamError(
                        f"{source_a.path} cannot be compared block by block: {error}; compare "
                        "whole models with ",
                        Setting("stream"),
                        " never",
                    ) from error
                how = f"whole models, as block by block is not possible: {error}"
        self.reference: LoadedReference | EmptyReference
        if self.streamed is None:
            self.reference = load_reference(source_a)
            self.candidate, candidate_note = load_candidate(source_b)
        else:
            self.reference, candidate_note = self.streamed[0], describe_candidate(source_b)
        if text is None:
            tokens = random_tokens(seed, padding_ids(self.reference.module))
        self.tokens, self.seed = tokens, seed
        self.about: dict[str, Any] = {
            "reference": f"{source_a.path}, {self.reference.note}, {dtype_names(source_a)}",
            "candidate": f"{source_b.path}, {candidate_note}, {dtype_names(source_b)}",
            "data": f"random {drawn} (seed {seed})" if drawn else tokens.note,
            "compared": how,
        }

    def _open_streamed(self) -> tuple[EmptyReference, Layout]:
        reference, candidate = self.sources
        reference = dataclasses.replace(reference, plan=as_class(reference.plan))
        self.sources = (reference, candidate)
        empty = EmptyReference(reference)
        modules = modules_of(empty.module)
        return empty, find_layout(reference.plan, candidate.plan.module, modules)

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
            UsageError: what the module is called with cannot be written, or the models were
                compared block by block.
            ResourceError: the folder cannot be written.
        """
        if self.streamed is not None:
            raise UsageError(
                "a repro needs the whole models in memory: use ", Setting("stream"), " never"
            )
        first = report.root_causes[0]
        write_repro(
            folder,
            self.reference.module,
            self.candidate,
            self._inputs(),
            first.path,
            jax_call=call_candidate,
            message=one_line(first.message),
            backward=self.mode == "grad",
        )

    def _compare_modules(self, dtype: str | None) -> tuple[Report, str]:
        inputs = self._inputs()
        if self.streamed is not None:
            report = self._compare_streamed(*self.streamed, inputs, dtype)
        else:
            report = compare(
                self.reference.module,
                self.candidate,
                inputs,
                backward=self.mode == "grad",
                dtype=dtype,
                torch_call=call_reference,
                jax_call=call_candidate,
            )
        return report, " and ".join(f"{x.dtype} {x.shape}" for x in inputs)

    def _compare_streamed(
        self,
        empty: EmptyReference,
        layout: Layout,
        inputs: Sequence[np.ndarray],
        dtype: str | None,
    ) -> Report:
        reference, candidate = self.sources
        tensors = candidate.plan.tensors
        dtype = dtype or tensors[next(iter(parameter_shapes(candidate.plan.module)))].dtype.name
        key = {
            "reference": describe_files(reference.path, reference.checkpoint.raw.files),
            "candidate": describe_files(candidate.path, candidate.checkpoint.raw.files),
            "notes": [self.about["reference"], self.about["candidate"], jaxformer.__version__],
            "settings": [repr(self.config), repr(candidate.config)],
            "inputs": [digest(array) for array in inputs],
            "mode": [self.mode, dtype],
        }
        state = State(self.streaming.folder or default_folder(key), key)
        self.about["compared"] += state.note
        report = StreamedComparison(
            empty, reference, candidate, layout, inputs, torch_call=call_reference,
            jax_call=call_candidate, backward=self.mode == "grad", dtype=dtype, state=state,
            progress=self.progress,
        ).report()  # fmt: skip
        state.remove()
        return report

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

    def _inputs(self) -> list[np.ndarray]:
        """Returns what both models are called with."""
        end = getattr(getattr(self.reference.module, "config", None), "eos_token_id", None)
        source = InputSource(self.tokens, self.batch, self.length, self.seed)
        end_token = end if isinstance(end, int) else None
        return source.draw(self.config, self.vocab_size, end_token)


def _check_mode(mode: Mode, source: Source) -> None:
    """Checks that a model supports a mode.

    Raises:
        UsageError: it does not.
    """
    if mode not in ("train", "generate"):
        return
    found = unsuitable(mode, source.config)
    if not found:
        return
    raise UsageError(
        Setting("mode"),
        f" {mode} needs a language model with a head, and {source.path} holds {found}: use ",
        Setting("mode"),
        " forward or grad",
    )
