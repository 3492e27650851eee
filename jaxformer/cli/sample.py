"""``jaxformer sample``: text from a model on standard output."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxformer.cli.arguments import given_names, parse
from jaxformer.cli.sample_models import build_model, load_draft, read_check
from jaxformer.cli.sample_options import SampleOptions, effects, parse_ids
from jaxformer.errors import TextError, UsageError
from jaxformer.training.run_arguments import check_effects

if TYPE_CHECKING:
    import numpy as np

    from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
    from jaxformer.data.text_generation import Prompt
    from jaxformer.encoder_decoder import EncoderDecoder
    from jaxformer.porting.checkpoint import Checkpoint, Tokenizer
    from jaxformer.transformer_lm import TransformerLM


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
    check_effects(given_names(arguments), effects(options))

    from jaxformer.config import EncoderDecoderConfig
    from jaxformer.data.text_generation import encode_chat, encode_prompt, encode_source
    from jaxformer.hardware.compilation_cache import use_compilation_cache
    from jaxformer.porting.checkpoint import open_checkpoint
    from jaxformer.porting.generation_settings import describe_unfollowed
    from jaxformer.porting.text_models import plan_text_model

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
    for warning in (*checkpoint.raw.warnings, *describe_unfollowed(checkpoint)):
        print(f"jaxformer: warning: {warning}", file=sys.stderr)
    plan = plan_text_model(checkpoint)
    config = plan.module.config
    reads_source = isinstance(config, EncoderDecoderConfig)
    ids = parse_ids(options.prompt_ids)
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
        for each in prompts:
            _check_model(config, size, each.ids)
        model = build_model(plan, options, read_check(options, tokenizer))
        _write_many(model, tokenizer, prompts, checkpoint.last_ids(), options)
        return
    if options.chat:
        prompt = encode_chat(tokenizer, options.prompt, checkpoint.files_beside())
    elif reads_source:
        prompt = encode_source(tokenizer, options.prompt, ids, options.unknown)
    else:
        first = checkpoint.first_ids()
        prompt = encode_prompt(tokenizer, options.prompt, ids, first, options.unknown)

    _check_model(config, config.source_vocab_size if reads_source else size, prompt.ids)
    if reads_source and options.weights_check is not None:
        raise UsageError("--weights-check is for language models, and this has an encoder")
    model = build_model(plan, options, read_check(options, tokenizer))
    prepare = _target_writer if reads_source else _text_writer
    writer = prepare(model, prompt.ids, checkpoint, options)
    _write_texts(writer, tokenizer, prompt.text, checkpoint.last_ids(), options)


def _read_prompts(
    options: SampleOptions, tokenizer: "Tokenizer | None", first_ids: Sequence[int]
) -> "list[Prompt]":
    """Returns the prompts of ``--prompts``, one of each line.

    Raises:
        UsageError: there is none, or the file cannot be read.
        TextError: the file is not UTF-8, or one has a character that the model does not know; the
            message names its line.
    """
    from jaxformer.data.text_generation import encode_prompt

    assert options.prompts is not None
    try:
        text = options.prompts.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"--prompts {options.prompts} cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        raise TextError(f"--prompts {options.prompts} is not UTF-8: {error}") from None
    if not text:
        raise UsageError(f"--prompts {options.prompts} holds no line")
    # Other characters that end a line for Python's splitlines are a part of a prompt.
    lines = text.removesuffix("\n").split("\n")
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(encode_prompt(tokenizer, line, (), first_ids, options.unknown))
        except TextError as error:
            raise TextError(f"line {number} of {options.prompts}: ", *error.args) from None
    return prompts


def _write_many(
    model: "TransformerLM",
    tokenizer: "Tokenizer | None",
    prompts: "Sequence[Prompt]",
    last_ids: Sequence[int],
    options: SampleOptions,
) -> None:
    import time

    from jaxformer.continuous_generation import Request, generate_requests
    from jaxformer.data.text_generation import decode_stream
    from jaxformer.execution.seeds import seed_key

    if options.seed + len(prompts) > 2**63:
        raise UsageError(
            f"--seed must be in [0, 2^63), with one more for each prompt: got {options.seed}"
        )
    requests = [
        Request(prompt.ids, options.tokens, seed_key(options.seed + n))
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
    from jaxformer.execution.seeds import seed_key
    from jaxformer.generation import stream_samples
    from jaxformer.speculative_generation import stream_with_draft

    size = model.config.vocab_size or 0
    stop_tokens = [i for i in checkpoint.last_ids() if 0 <= i < size]
    settings: dict[str, Any] = {"stop_tokens": stop_tokens, **_choice(options)}
    if options.draft is None:
        # All texts of a command share its prompt, which is read once.
        keys = [seed_key(options.seed + n) for n in range(options.samples)]
        texts = stream_samples(model, prompt_T[None], options.tokens, keys, **settings)
        return Writer(prompt_T, lambda seed: texts[seed - options.seed])
    draft = load_draft(model, checkpoint, options)

    def make(seed: int) -> "Iterator[np.ndarray]":
        return stream_with_draft(
            model,
            draft,
            prompt_T[None],
            options.tokens,
            draft_tokens=options.draft_tokens,
            key=seed_key(seed),
            **settings,
        )

    return Writer(prompt_T, make)


def _target_writer(
    model: "EncoderDecoder",
    source_S: "np.ndarray",
    checkpoint: "Checkpoint",
    options: SampleOptions,
) -> Writer:
    """Returns what writes the target of a source, at once."""
    from jaxformer.data.text_generation import write_target
    from jaxformer.execution.seeds import seed_key

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
            key=seed_key(seed),
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
