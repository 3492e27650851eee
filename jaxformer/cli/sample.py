"""``jaxformer sample``: options, and text from a model on standard output."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import tyro

from jaxformer.checks import check_integers
from jaxformer.cli.arguments import Switch, parse
from jaxformer.errors import TextError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
    from jaxformer.data.text_generation import Prompt
    from jaxformer.encoder_decoder import EncoderDecoder
    from jaxformer.porting.checkpoint import Checkpoint, Tokenizer
    from jaxformer.transformer_lm import TransformerLM

# Below this, float32 has no room for a logit over the temperature, nor for a share of all tokens.
MIN_VALUE = 1e-6


@dataclass(frozen=True)
class SampleOptions:
    """Write text with a model; standard output holds the text alone."""

    path: tyro.conf.Positional[Path]
    """A run's folder, or any checkpoint that jaxformer port reads."""
    prompt: str = ""
    """What the text begins with; default a new line, or the model's own first token. Of an encoder
    and decoder, the source of which it writes the target."""
    prompt_ids: str = ""
    """What the text begins with, as ids (1,2,3), for a model without a tokenizer."""
    prompts: Path | None = None
    """A file with a prompt on each line: a text is written after each, many at a time, and shown
    with the number of its line as soon as it is whole."""
    rows: int = 8
    """With --prompts, how many texts are written at the same time."""
    chat: Switch = False
    """Give --prompt as a message, in the model's chat template; standard output is the answer."""
    tokens: int = 500
    """How many tokens to write: characters, where the model was trained on such."""
    temperature: float = 0.8
    """Below 1 plays safe, above 1 takes chances."""
    top_k: int | None = None
    """Choose among the k most probable tokens."""
    top_p: float | None = None
    """Choose among the most probable tokens that together reach this probability."""
    seed: int = 0
    """The same seed writes the same text."""
    greedy: Switch = False
    """Always take the most probable token."""
    samples: int = 1
    """How many texts to write."""
    draft: Path | None = None
    """A smaller model with the same tokens, which proposes what the model then checks: faster."""
    draft_tokens: int = 4
    """How many tokens the draft proposes at a time."""
    step: int | None = None
    """Which checkpoint to use; default the newest."""
    best: Switch = False
    """Use the checkpoint with the lowest validation loss."""
    unknown: Literal["error", "skip", "replace"] = "error"
    """What to do with a prompt's characters that the model does not know."""
    dialect: str | None = None
    """Whose names the checkpoint's arrays have; default what it shows."""
    force: Switch = False
    """Take --dialect even where the checkpoint's config is of another model_type."""
    config: Path | None = None
    """The model's settings as JSON, which go before those in the checkpoint."""
    meta: Path | None = None
    """nanoGPT's meta.pkl, or a tokenizer.json; default what lies beside the checkpoint."""
    ignore: tuple[str, ...] = ()
    """Arrays to leave out, by name or pattern ('bert.pooler.*'), and settings without effect."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, and use those that are there."""
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"--temperature must be positive and finite: got {self.temperature}")
        if self.temperature < MIN_VALUE:
            raise ValueError(
                f"--temperature must be at least {MIN_VALUE}: got {self.temperature}; the most "
                "probable token is what --greedy takes"
            )
        counts = ("tokens", "samples", "top_k", "draft_tokens", "rows")
        check_integers(self, *counts)
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1: got {value}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p must be in (0, 1]: got {self.top_p}")
        if self.top_p is not None and self.top_p < MIN_VALUE:
            raise ValueError(f"--top-p must be at least {MIN_VALUE}: got {self.top_p}")
        if not 0 <= self.seed <= 2**63 - self.samples:
            raise ValueError(
                f"--seed must be in [0, 2^63), with one more for each sample: got {self.seed}"
            )
        if self.step is not None and self.best:
            raise ValueError("--step and --best exclude each other")
        if self.prompt and self.prompt_ids:
            raise ValueError("--prompt and --prompt-ids exclude each other")
        others = ("prompt", "prompt_ids", "chat", "draft")
        given = [name for name in others if getattr(self, name)]
        given += ["samples"] if self.samples > 1 else []
        if self.prompts is not None and given:
            raise ValueError(f"--prompts and --{given[0].replace('_', '-')} exclude each other")
        if self.chat and not self.prompt:
            raise ValueError("--chat needs --prompt: the message to the model")
        _parse_ids(self.prompt_ids)


def _parse_ids(text: str) -> list[int]:
    """Returns the ids of ``--prompt-ids 1,2,3``.

    Raises:
        ValueError: they are not numbers, or one is out of its range.
    """
    try:
        ids = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"--prompt-ids must be numbers with commas between: got {text}") from None
    if any(not 0 <= i < 2**31 for i in ids):
        raise ValueError(f"--prompt-ids must be in [0, 2^31): got {text}")
    return ids


def run(arguments: Sequence[str]) -> None:
    """Writes texts to standard output as they are generated, each after the prompt.

    Their speed is written to standard error at the end.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        TextError: the prompt has a character or an id that the model does not know.
        UsageError: the model cannot write text, or there is neither a tokenizer nor a prompt of
            ids.
    """
    options: SampleOptions = parse(SampleOptions, "jaxformer sample", arguments)

    from jaxformer.config import EncoderDecoderConfig
    from jaxformer.data.text_generation import encode_chat, encode_prompt, encode_source
    from jaxformer.hardware.compilation_cache import use_compilation_cache
    from jaxformer.porting.api import build
    from jaxformer.porting.checkpoint import in_float32, open_checkpoint, plan_text_model

    use_compilation_cache(options.compilation_cache)
    checkpoint = open_checkpoint(
        options.path,
        dialect=options.dialect,
        config=options.config,
        meta=options.meta,
        step=options.step,
        best=options.best,
        ignore=options.ignore,
        force=options.force,
    )
    for warning in checkpoint.raw.warnings:
        print(f"jaxformer: warning: {warning}", file=sys.stderr)
    plan = plan_text_model(checkpoint)
    config = plan.module.config
    reads_source = isinstance(config, EncoderDecoderConfig)
    ids = _parse_ids(options.prompt_ids)
    try:
        size = config.target_vocab_size if reads_source else config.vocab_size
        tokenizer = checkpoint.tokenizer(size)
    except UsageError:
        # A missing tokenizer matters only to those who want text.
        if not ids:
            raise
        tokenizer = None
    if options.prompts is not None:
        if reads_source:
            raise UsageError("--prompts is for language models, and this has an encoder")
        prompts = _read_prompts(options, tokenizer, checkpoint.first_ids())
        model = build(in_float32(plan))
        for each in prompts:
            _check_model(config, size, each.ids)
        _write_many(model, tokenizer, prompts, checkpoint.last_ids(), options)
        return
    if options.chat:
        prompt = encode_chat(tokenizer, options.prompt, checkpoint.files_beside())
    elif reads_source:
        prompt = encode_source(tokenizer, options.prompt, ids, options.unknown)
    else:
        first = checkpoint.first_ids()
        prompt = encode_prompt(tokenizer, options.prompt, ids, first, options.unknown)

    model = build(in_float32(plan))
    _check_model(config, config.source_vocab_size if reads_source else size, prompt.ids)
    prepare = _target_writer if reads_source else _text_writer
    writer = prepare(model, prompt.ids, checkpoint, options)
    _write_texts(writer, tokenizer, prompt.text, checkpoint.last_ids(), options)


def _read_prompts(
    options: SampleOptions, tokenizer: "Tokenizer | None", first_ids: Sequence[int]
) -> "list[Prompt]":
    """Returns the prompts of ``--prompts``, one of each line.

    Raises:
        UsageError: there is none, or the file cannot be read.
        TextError: one has a character that the model does not know; the message names its line.
    """
    from jaxformer.data.text_generation import encode_prompt

    assert options.prompts is not None
    try:
        lines = options.prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {options.prompts} cannot be read: {error}") from None
    if not lines:
        raise UsageError(f"--prompts {options.prompts} holds no line")
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(encode_prompt(tokenizer, line, (), first_ids, options.unknown))
        except TextError as error:
            raise TextError(f"line {number} of {options.prompts}: {error}") from None
    return prompts


def _write_many(
    model: "TransformerLM",
    tokenizer: "Tokenizer | None",
    prompts: "Sequence[Prompt]",
    last_ids: Sequence[int],
    options: SampleOptions,
) -> None:
    import time

    import jax

    from jaxformer.continuous_generation import Request, generate_requests
    from jaxformer.data.text_generation import decode_stream

    requests = [
        Request(prompt.ids, options.tokens, jax.random.key(options.seed + n))
        for n, prompt in enumerate(prompts)
    ]
    stop_tokens = [i for i in last_ids if 0 <= i < (model.config.vocab_size or 0)]
    begin, count = time.perf_counter(), 0
    texts = generate_requests(
        model, requests, rows=options.rows, stop_tokens=stop_tokens, **_choice(options)
    )
    for done, (number, made) in enumerate(texts):
        pieces = decode_stream(tokenizer, prompts[number].ids, [made[None]], last_ids)
        title = f"--- {number + 1} of {len(prompts)} ---"
        _write(f"{chr(10) * 2 if done else ''}{title}\n{prompts[number].text}{''.join(pieces)}")
        count += len(made)
    _write("\n")
    seconds = time.perf_counter() - begin
    sys.stderr.write(
        f"{count:,} tokens of {len(prompts)} texts in {seconds:.3g} s, what was compiled included\n"
    )


def _check_model(
    config: "TransformerLMConfig | EncoderDecoderConfig", size: int, prompt_ids: "np.ndarray"
) -> None:
    if unknown := [int(i) for i in prompt_ids if not 0 <= i < size]:
        raise TextError(f"id {unknown[0]} of the prompt is outside the model's {size} tokens")
    if not config.causal or config.head.head == "none":
        raise UsageError("only a causal model with a head writes text, and this is none")


class Writer(NamedTuple):
    """What makes texts.

    Attributes:
        before: ids (T,) that stand before the first new one.
        make: yields the new ids, (1, n) at a time, for a seed.
    """

    before: "np.ndarray"
    make: Callable[[int], "Iterator[np.ndarray]"]


def _text_writer(
    model: "TransformerLM", prompt_T: "np.ndarray", checkpoint: "Checkpoint", options: SampleOptions
) -> Writer:
    """Returns what writes after a prompt."""
    import jax

    from jaxformer.generation import stream_samples
    from jaxformer.speculative_generation import stream_with_draft

    size = model.config.vocab_size or 0
    stop_tokens = [i for i in checkpoint.last_ids() if 0 <= i < size]
    settings: dict[str, Any] = {"stop_tokens": stop_tokens, **_choice(options)}
    if options.draft is None:
        # All texts of a command share its prompt, which is read once.
        keys = [jax.random.key(options.seed + n) for n in range(options.samples)]
        texts = stream_samples(model, prompt_T[None], options.tokens, keys, **settings)
        return Writer(prompt_T, lambda seed: texts[seed - options.seed])
    draft = _load_draft(model, checkpoint, options)

    def make(seed: int) -> "Iterator[np.ndarray]":
        return stream_with_draft(
            model,
            draft,
            prompt_T[None],
            options.tokens,
            draft_tokens=options.draft_tokens,
            key=jax.random.key(seed),
            **settings,
        )

    return Writer(prompt_T, make)


def _load_draft(
    model: "TransformerLM", checkpoint: "Checkpoint", options: SampleOptions
) -> "TransformerLM":
    """Returns the model that ``--draft`` names.

    Raises:
        UsageError: it cannot write for the model.
    """
    from jaxformer.porting.api import build
    from jaxformer.porting.checkpoint import in_float32, open_checkpoint, plan_language_model
    from jaxformer.speculative_generation import check_draft

    assert options.draft is not None
    opened = open_checkpoint(options.draft)
    draft: TransformerLM = build(in_float32(plan_language_model(opened)))
    known = checkpoint.vocabulary, opened.vocabulary
    if None not in known and known[0] != known[1]:
        raise UsageError(f"--draft {options.draft} has other characters than the model")
    try:
        check_draft(model, draft, options.draft_tokens)
    except ValueError as error:
        raise UsageError(f"--draft {options.draft}: {error}") from None
    return draft


def _target_writer(
    model: "EncoderDecoder",
    source_S: "np.ndarray",
    checkpoint: "Checkpoint",
    options: SampleOptions,
) -> Writer:
    """Returns what writes the target of a source, at once."""
    import jax

    from jaxformer.data.text_generation import write_target

    if options.draft is not None:
        raise UsageError("--draft is for language models, and this has an encoder")
    begin, last = checkpoint.target_ids()

    def make(seed: int) -> "Iterator[np.ndarray]":
        yield write_target(
            model,
            source_S[None],
            options.tokens,
            begin=begin,
            last_ids=checkpoint.last_ids(),
            last_token=last,
            key=jax.random.key(seed),
            **_choice(options),
        )

    return Writer(source_S[:0], make)


def _choice(options: SampleOptions) -> dict[str, Any]:
    """Returns the settings by which tokens are chosen."""
    return {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "greedy")}


def _write_texts(
    writer: Writer,
    tokenizer: "Tokenizer | None",
    prompt: str,
    last_ids: Sequence[int],
    options: SampleOptions,
) -> None:
    from jaxformer.data.text_generation import GenerationSpeed, decode_stream

    speed = GenerationSpeed()
    for n in range(options.samples):
        if options.samples > 1:
            _write(("\n\n" if n else "") + f"--- {n + 1} of {options.samples} ---\n")
        _write(prompt)
        chunks = speed.watch(writer.make(options.seed + n))
        for text in decode_stream(tokenizer, writer.before, chunks, last_ids):
            _write(text)
    _write("\n")
    sys.stderr.write(f"{speed}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
