"""Text that a model writes: a prompt to ids, new ids to text as they come, their speed."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxformer.data.chat import render_chat
from jaxformer.data.tokenizers import HuggingFaceTokenizer
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.errors import UsageError
from jaxformer.sequence_generation import generate_target


class Prompt(NamedTuple):
    """What a text begins with.

    Attributes:
        ids: (T,), at least one.
        text: the part of it that is shown.
    """

    ids: np.ndarray
    text: str


def encode_prompt(
    tokenizer: Any,
    text: str,
    ids: Sequence[int],
    first_ids: Sequence[int],
    unknown: Literal["error", "skip", "replace"],
) -> Prompt:
    """Returns the ids of a prompt: of the ids given, else of the text, else the model's own start.

    Args:
        tokenizer: makes ids of text and text of ids, or None.
        text: of the prompt; may be empty.
        ids: of the prompt; may be empty.
        first_ids: what the model begins every text with; a new line where it is empty. Not shown.
        unknown: see ``CharTokenizer.encode``.

    Raises:
        TextError: the text has a character that the tokenizer does not know.
        UsageError: there is neither a tokenizer nor a prompt of ids.
    """
    if ids:
        prompt_T = np.array(ids, np.int64)
        known = tokenizer is not None and prompt_T.max() < tokenizer.vocabulary_size()
        return Prompt(prompt_T, tokenizer.decode(prompt_T) if known else " ".join(map(str, ids)))
    if tokenizer is None:
        raise _no_tokenizer()
    if text:
        prompt_T = tokenizer.encode(text, unknown=unknown)
        if len(prompt_T):
            return Prompt(prompt_T, text)
    if first_ids:
        return Prompt(np.array(first_ids, np.int64), "")
    return Prompt(tokenizer.encode("\n", unknown="replace"), "")


def encode_source(
    tokenizer: Any,
    text: str,
    ids: Sequence[int],
    unknown: Literal["error", "skip", "replace"],
) -> Prompt:
    """Returns the ids of what an encoder reads, of which nothing is shown.

    Args:
        tokenizer: makes ids of text, with those that it puts around every text; or None.
        text: of the source.
        ids: of the source; they take the place of the text.
        unknown: see ``CharTokenizer.encode``.

    Raises:
        TextError: the text has a character that the tokenizer does not know.
        UsageError: there is no source, or neither a tokenizer nor ids.
    """
    if ids:
        return Prompt(np.array(ids, np.int64), "")
    if tokenizer is None:
        raise _no_tokenizer()
    source_S = tokenizer.encode(text, unknown=unknown) if text else np.zeros(0)
    if not len(source_S):
        raise UsageError("an encoder and decoder writes the target of a source: give --prompt TEXT")
    return Prompt(source_S.astype(np.int64), "")


def _no_tokenizer() -> UsageError:
    return UsageError(
        "there is no tokenizer: give --meta FILE (nanoGPT's meta.pkl or a tokenizer.json), or "
        "ids instead of text with --prompt-ids 1,2,3"
    )


def encode_chat(tokenizer: Any, text: str, files: Mapping[str, Path]) -> Prompt:
    """Returns the ids of a message to the model, of which nothing is shown.

    Args:
        tokenizer: a ``HuggingFaceTokenizer``.
        text: of the message.
        files: those beside the model's weights, by name; one has the chat template.

    Raises:
        UsageError: there is no such tokenizer, no chat template, or jinja2 is not installed.
        TextError: the template rejects the message.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UsageError("--chat needs a tokenizer.json, and the model has none")
    chat = render_chat([{"role": "user", "content": text}], files)
    return Prompt(tokenizer.encode(chat, around_every_text=False).astype(np.int64), "")


def write_target(
    model: EncoderDecoder,
    source_BS: np.ndarray,
    tokens: int,
    *,
    begin: Sequence[int],
    last_ids: Sequence[int],
    **settings: Any,
) -> np.ndarray:
    """Returns what follows the first ids of each source's target, int32 (B, n).

    Args:
        model: with a causal decoder and a head.
        source_BS: ids of the sources.
        tokens: the most to make.
        begin: the ids that every target begins with.
        last_ids: a target ends with the first of these.
        settings: of ``generate_target``.

    Raises:
        UsageError: it is not known what targets begin with.
        ValueError: see ``generate_target``.
    """
    if not begin:
        raise UsageError(
            "the model does not say what its targets begin with (decoder_start_token_id in "
            "config.json or generation_config.json): call jaxformer.generate_target"
        )
    return generate_target(
        model,
        source_BS,
        tokens,
        start_BT=np.tile(np.array(begin, np.int32), (len(source_BS), 1)),
        stop_tokens=[i for i in last_ids if 0 <= i < model.config.target_vocab_size],
        **settings,
    )


def decode_stream(
    tokenizer: Any, prompt_ids: np.ndarray, chunks: Iterable[np.ndarray], last_ids: Sequence[int]
) -> Iterator[str]:
    """Yields what each chunk of new ids adds to the text, until the text ends.

    Args:
        tokenizer: makes text of ids; None yields the ids as numbers.
        prompt_ids: (T,), what stands before the first chunk.
        chunks: each (1, n).
        last_ids: the text ends before the first of these.
    """
    new_ids: list[int] = []
    # A token may be half a character, and what it is can depend on the one before: the text is
    # decoded from its start, and a character that is not whole yet waits for the next chunk.
    written = "" if tokenizer is None else tokenizer.decode(prompt_ids)
    for chunk in chunks:
        new = [int(i) for i in chunk[0]]
        end = next((place for place, i in enumerate(new) if i in last_ids), len(new))
        if tokenizer is None:
            yield "".join(f" {i}" for i in new[:end])
        else:
            new_ids += [i for i in new[:end] if i < tokenizer.vocabulary_size()]
            text = tokenizer.decode([*prompt_ids, *new_ids])
            whole = text.rstrip("\N{REPLACEMENT CHARACTER}") if end == len(new) else text
            yield whole[len(written) :]
            written = whole if len(whole) > len(written) else written
        if end < len(new):
            return


class GenerationSpeed:
    """How fast tokens come; what was compiled meanwhile is kept apart.

    Attributes:
        first_tokens: of each text, the seconds from its start to its first token, and whether a
            program was compiled in them.
        tokens: how many came after a first one while nothing was compiled.
        seconds: the time that these took.
    """

    def __init__(self) -> None:
        self.first_tokens: list[tuple[float, bool]] = []
        self.tokens = 0
        self.seconds = 0.0
        self._compiled = False

    def watch(self, chunks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields the chunks of one text; only the time until each comes is counted."""
        jax.monitoring.register_event_duration_secs_listener(self._notice)
        try:
            begin = time.perf_counter()
            for number, chunk in enumerate(chunks):
                seconds = time.perf_counter() - begin
                if number == 0:
                    self.first_tokens.append((seconds, self._compiled))
                elif not self._compiled:
                    self.tokens += chunk.shape[1]
                    self.seconds += seconds
                self._compiled = False
                yield chunk
                begin = time.perf_counter()
        finally:
            jax.monitoring.unregister_event_duration_listener(self._notice)

    def __str__(self) -> str:
        parts = []
        for was_compiled, words in ((True, ", compilation included"), (False, "")):
            found = [seconds for seconds, compiled in self.first_tokens if compiled == was_compiled]
            if found:
                parts.append(f"first token after {sum(found) / len(found):.3g} s{words}")
        if self.seconds:
            parts.append(f"{self.tokens / self.seconds:,.0f} tokens/s after it")
        return "; ".join(parts)

    def _notice(self, event: str, duration_secs: float, **_: Any) -> None:
        self._compiled |= event == "/jax/core/compile/backend_compile_duration"
