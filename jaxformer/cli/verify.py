"""What ``jaxformer verify`` does: open both, run both, judge, and say so."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from jaxformer.cli.verify_options import VerifyOptions
from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.errors import JaxformerError, ResourceError, UsageError
from jaxformer.parity.report.files import load_report, save_json
from jaxformer.parity.report.model import Report
from jaxformer.parity.report.regressions import compare_reports
from jaxformer.parity.report.text import one_line
from jaxformer.parity.trace.torch_trace import require_torch

# How many of the things that got worse are told.
MAX_WORSE = 20


def verify(options: VerifyOptions) -> int:
    """Compares two checkpoints and prints what was found on standard output.

    Args:
        options: the settings.

    Returns:
        The exit code: 0 if they are equal but for rounding, 1 if not, or if something got worse.

    Raises:
        JaxformerError: the comparison cannot be made.
    """
    require_torch()
    before = None if options.against is None else load_report(options.against)
    _check_outputs(options)

    import jax

    with jax.enable_x64(True):
        comparison = _Comparison(options)
        report = comparison.report()
        repro = comparison.write_repro(report)
    worse = [] if before is None else compare_reports(report, before)
    try:
        _write(report, options)
    finally:
        # A full disk is no reason to lose what was found.
        _print(report, worse, repro, options)
    return 1 if report.verdict == "bug" or worse else 0


class _Comparison:
    """Two checkpoints, opened and found to fit one another."""

    def __init__(self, options: VerifyOptions):
        from jaxformer.data.corpora import load_corpus
        from jaxformer.parity.sources.checkpoints import (
            check_alike,
            dtype_names,
            in_layout_of,
            load_candidate,
            load_reference,
            open_source,
            padding_ids,
        )
        from jaxformer.parity.sources.tokens import chosen_length, random_tokens, text_tokens

        self.options = options
        self.began = time.monotonic()
        text = None
        if options.data != "random":
            text = load_corpus(options.data, encoding=options.encoding).text
        self.source_a = open_source(
            options.reference, "a", dialect=options.dialect_a, config=options.config_a
        )
        self.source_b = open_source(
            options.candidate, "b", dialect=options.dialect_b, config=options.config_b
        )
        for source in (self.source_a, self.source_b):
            for warning in source.checkpoint.raw.warnings:
                print(f"jaxformer: warning: {warning}", file=sys.stderr)
        check_alike(self.source_a, self.source_b)
        self.source_b = in_layout_of(self.source_a, self.source_b)
        self._check_mode()
        contexts = [source.config.context_length for source in (self.source_a, self.source_b)]
        self.context_length = min(contexts)
        self.length = chosen_length(options, self.context_length)
        self.batch = options.batch or 1
        if text is not None:
            needed = self.batch * self.length + (options.mode == "train")
            tokens = text_tokens(text, needed, (self.source_a, self.source_b), options)
        self.reference = load_reference(self.source_a)
        self.module, candidate_note = load_candidate(self.source_b)
        if text is None:
            tokens = random_tokens(options.seed, padding_ids(self.reference.module))
        self.tokens = tokens
        self.about: dict[str, Any] = {
            "reference": (
                f"{options.reference}, {self.reference.note}, {dtype_names(self.source_a)}"
            ),
            "candidate": f"{options.candidate}, {candidate_note}, {dtype_names(self.source_b)}",
            "data": tokens.note,
        }

    def report(self) -> Report:
        """Runs both, as the mode asks for."""
        run = {
            "forward": self._passes,
            "grad": self._passes,
            "train": self._training,
            "generate": self._generation,
        }[self.options.mode]
        report = run()
        about = {**self.about, "seconds": round(time.monotonic() - self.began, 1)}
        return dataclasses.replace(report, about=about)

    def write_repro(self, report: Report) -> str:
        """Writes what shows the first bug by itself, if it is wanted; returns where, in words."""
        if self.options.repro is None or not report.root_causes:
            return ""
        from jaxformer.parity.repro.writer import write_repro

        first = report.root_causes[0]
        try:
            write_repro(
                self.options.repro,
                self.reference.module,
                self.module,
                self._inputs(),
                first.path,
                jax_call=self._call_candidate,
                message=one_line(first.message),
                backward=self.options.mode == "grad",
            )
        except JaxformerError as error:
            return f"not written: {error}"
        return str(self.options.repro)

    def _passes(self) -> Report:
        from jaxformer.parity.compare.modules import compare

        inputs = self._inputs()
        self.about["inputs"] = " and ".join(f"{x.dtype} {x.shape}" for x in inputs)
        return compare(
            self.reference.module,
            self.module,
            inputs,
            backward=self.options.mode == "grad",
            dtype=self.options.dtype,
            torch_call=self.reference.call,
            jax_call=self._call_candidate,
        )

    def _training(self) -> Report:
        from jaxformer.parity.compare.training import compare_training

        vocab_size = self._vocab_size()

        def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
            count = self.batch * self.length
            ids = self.tokens.draw(number * count, count + 1, vocab_size)
            shape = self.batch, self.length
            return ids[:-1].reshape(shape), ids[1:].reshape(shape)

        steps = self.options.steps or 10
        self.about["inputs"] = f"{steps} batches of int64 {(self.batch, self.length)}"
        report = compare_training(
            self.reference.module,
            self.module,
            batch,
            steps=steps,
            dropout=self.options.dropout,
        )
        return self._with_settings(report)

    def _generation(self) -> Report:
        from jaxformer.parity.compare.generation import compare_generation

        tokens = min(self.options.tokens or 20, self.context_length - 1)
        length = min(self.length, self.context_length - tokens)
        prompt = self.tokens.window(0, 1, length, self._vocab_size())
        self.about["inputs"] = f"a prompt of {length} tokens, {tokens} to write"
        report = compare_generation(self.reference.module, self.module, prompt, tokens=tokens)
        return self._with_settings(report)

    def _with_settings(self, report: Report) -> Report:
        from jaxformer.parity.compare.settings import compare_settings, precision_flags

        found = compare_settings(self.module, self.source_a.plan.module) + precision_flags()
        return dataclasses.replace(report, settings=tuple(found))

    def _inputs(self) -> Sequence[np.ndarray]:
        """Ids (B, T); of an encoder and decoder, those of source and target."""
        config = self.source_a.config
        if isinstance(config, TransformerLMConfig):
            return [self.tokens.window(0, self.batch, self.length, self._vocab_size())]
        # Not of the same length, so that the two cannot be confused.
        lengths = self.length, max(1, self.length - self.length // 4)
        return [
            self.tokens.window(place, self.batch, length, size)
            for place, (length, size) in enumerate(
                zip(lengths, (config.source_vocab_size, config.target_vocab_size), strict=True)
            )
        ]

    def _call_candidate(self, module: Any, given: Sequence[Any]) -> Any:
        output = module(*given)
        if getattr(module.config, "pooler", False):
            # Theirs pools in the same call.
            module.pooled(output)
        return output

    def _vocab_size(self) -> int:
        from jaxformer.parity.sources.tokens import vocabulary_size

        return min(vocabulary_size(source) for source in (self.source_a, self.source_b))

    def _check_mode(self) -> None:
        """Refuses modes that the models have no part in."""
        mode = self.options.mode
        if mode not in ("train", "generate"):
            return
        for source in (self.source_a, self.source_b):
            config = source.config
            what = f"--mode {mode} needs a language model with a head, and {source.path} holds"
            if isinstance(config, EncoderDecoderConfig):
                raise UsageError(f"{what} an encoder and a decoder: use --mode forward or grad")
            if config.head == "none" or (mode == "generate" and not config.causal):
                kind = "no head" if config.head == "none" else "one that sees later tokens"
                raise UsageError(f"{what} {kind}: use --mode forward or grad")
            if mode == "generate" and config.context_length < 2:
                raise UsageError(f"{what} one that holds a single token")


def _check_outputs(options: VerifyOptions) -> None:
    """Refuses, before anything is computed, what could not be written at the end.

    Raises:
        UsageError: the repro's folder is in use.
        ResourceError: the folder of a file is missing.
    """
    for path in (options.html, options.json, options.repro):
        if path is not None and not path.absolute().parent.is_dir():
            raise ResourceError(f"{path}: the folder {path.parent} does not exist; make it first")
    for path in (options.html, options.json):
        if path is not None and path.is_dir():
            raise UsageError(f"{path} is a folder: name a file in it")
    repro = options.repro
    if repro is not None and (repro.is_file() or (repro.is_dir() and any(repro.iterdir()))):
        raise UsageError(f"--repro {repro} exists: give the name of a new folder")


def _write(report: Report, options: VerifyOptions) -> None:
    if options.json is not None:
        save_json(report, options.json)
    if options.html is not None:
        from jaxformer.parity.report.html.writer import write_html

        write_html(report, options.html)


def _print(report: Report, worse: Sequence[str], repro: str, options: VerifyOptions) -> None:
    """The report; its last line is the verdict, or what got worse where all is equal."""
    from jaxformer.parity.report.terminal import print_report

    console = Console(highlight=False, soft_wrap=True)
    for letter, side in (("A", "reference"), ("B", "candidate")):
        console.print(f"[dim]{letter}, {side:<6}[/]  {escape(str(report.about[side]))}")
    inputs = f"{report.about['data']}; {report.about['inputs']}"
    console.print(f"[dim]inputs    [/]  {escape(inputs)}")
    for what, where in (("json", options.json), ("html", options.html), ("repro", repro)):
        if where:
            console.print(f"[dim]{what:<10}[/]  {escape(str(where))}")
    told = [one_line(line) for line in worse]
    is_bug = report.verdict == "bug"
    if options.against is not None:
        count = f"{len(told)} things got worse" if told else "nothing got worse"
        console.print(f"[dim]against   [/]  {escape(str(options.against))}: {count}")
        # The last line is the bug's; without one it is the first of these.
        for line in told[0 if is_bug else 1 :][:MAX_WORSE]:
            console.print(escape(f"  {line}"), style="red")
    console.print()
    print_report(report, console)
    if told and not is_bug:
        console.print(escape(f"worse than {options.against}: {told[0]}"), style="bold red")
