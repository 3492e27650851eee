"""``TextModel``: what a model writes, of texts or of ids."""

import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from jaxformer.api.loaded_model import LoadedModel
from jaxformer.char_data import Unknown
from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.continuous_generation import Request, generate_requests
from jaxformer.data.text_generation import (
    decode_stream,
    encode_prompt,
    encode_source,
    write_target,
)
from jaxformer.dual_encoder import DualEncoder
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.errors import Setting, UsageError
from jaxformer.execution.seeds import seed_key
from jaxformer.generation import stream
from jaxformer.porting.arguments import check_options, check_text, wrong_kind
from jaxformer.porting.checkpoint import Tokenizer
from jaxformer.speculative_generation import stream_with_draft
from jaxformer.transformer_lm import TransformerLM
from jaxformer.vision_transformer import VisionTransformer

Ids = Sequence[int] | np.ndarray


class TextModel(LoadedModel):
    """Writes what follows a prompt, or the target of a source; see ``Model``."""

    @overload
    def generate(self, prompt: str = "", tokens: int = 200, **settings: Any) -> str: ...

    @overload
    def generate(self, prompt: Ids, tokens: int = 200, **settings: Any) -> np.ndarray: ...

    def generate(
        self, prompt: str | Ids = "", tokens: int = 200, **settings: Any
    ) -> str | np.ndarray:
        """Returns what follows a prompt: text after text, ids after ids.

        Args:
            prompt: a text, or ids (T,) or (B, T), int; of an encoder and decoder the source, its
                ids with those that the tokenizer puts around a text.
            tokens: the most tokens to make; a text ends earlier with the model's own last token.
            settings: those of ``stream``.

        Returns:
            Text; for ids, ids int32 of shape (n,) or (B, n).

        Raises:
            UsageError: the model cannot write, has no tokenizer for a text, or there is no such
                setting.
            TextError: the prompt has a character that the tokenizer does not know.
            ValueError: a setting is out of its range, or an id outside the vocabulary.
        """
        of_ids = [name for name in STREAMING if name != "unknown"]
        check_options("generate", settings, STREAMING if isinstance(prompt, str) else of_ids)
        if isinstance(prompt, str):
            return "".join(self.stream(prompt, tokens, **settings))
        ids = _as_array(prompt)
        chunks = self._chunks(ids[None] if ids.ndim == 1 else ids, tokens, **settings)
        made = np.concatenate([np.zeros((len(np.atleast_2d(ids)), 0), np.int32), *chunks], axis=1)
        return made[0] if ids.ndim == 1 else made

    def stream(
        self,
        prompt: str = "",
        tokens: int = 200,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        greedy: bool = False,
        seed: int = 0,
        unknown: Unknown = "error",
        draft: "TextModel | None" = None,
        draft_tokens: int = 4,
    ) -> Iterator[str]:
        """Yields what follows a prompt, piece by piece, as it is made.

        Args:
            prompt: a text; an empty one begins as the model's texts do. Of an encoder and decoder
                the source, which is not empty; its target comes in one piece.
            tokens: the most tokens to make.
            temperature: below 1 the probable becomes more probable, above 1 less.
            top_k: choose among the k most probable tokens.
            top_p: choose among the most probable tokens that together reach this probability.
            greedy: always take the most probable token.
            seed: the same seed makes the same text; in [0, 2^63).
            unknown: what to do with characters that the model does not know.
            draft: a smaller language model with the same tokens, which proposes what this one
                checks: the same greedy text, and samples of the same probabilities. It saves time
                where a pass over a few tokens costs little more than one over a token.
            draft_tokens: how many tokens it proposes at a time.

        Raises:
            UsageError: the model cannot write, or has no tokenizer.
            TextError: the prompt has a character that the tokenizer does not know.
            ValueError: a setting is out of its range.
        """
        check_text("prompt", prompt)
        tokenizer, ids = self._encode(prompt, unknown)
        chunks = self._chunks(
            ids[None], tokens, temperature=temperature, top_k=top_k, top_p=top_p, greedy=greedy,
            seed=seed, draft=draft, draft_tokens=draft_tokens,
        )  # fmt: skip
        before = ids[:0] if isinstance(self.module, EncoderDecoder) else ids
        return decode_stream(tokenizer, before, chunks, self._last_ids())

    @overload
    def generate_many(
        self, prompts: Sequence[str], tokens: int | Sequence[int] = 200, **settings: Any
    ) -> Iterator[tuple[int, str]]: ...

    @overload
    def generate_many(
        self, prompts: Sequence[Ids], tokens: int | Sequence[int] = 200, **settings: Any
    ) -> Iterator[tuple[int, np.ndarray]]: ...

    def generate_many(
        self,
        prompts: Sequence[str] | Sequence[Ids],
        tokens: int | Sequence[int] = 200,
        *,
        rows: int = 8,
        seed: int = 0,
        unknown: Unknown = "error",
        **settings: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Yields what follows each of many prompts, with its number, as soon as it is whole.

        Prompts and texts may be of any lengths: as soon as one text ends, the next begins in its
        place. Text n is the one that ``generate`` makes of its prompt with ``seed + n``.

        Args:
            prompts: texts, or ids (T,) of each.
            tokens: the most tokens to make of each, or of all.
            rows: how many texts are written at the same time.
            seed: that of the first.
            unknown: see ``stream``.
            settings: ``temperature``, ``top_k``, ``top_p`` and ``greedy`` of ``stream``.

        Raises:
            UsageError: the model is no language model that writes, has no tokenizer for a text, the
                prompts are no list, or there is no such setting.
            TextError: a prompt has a character that the tokenizer does not know.
            ValueError: a setting is out of its range, an id outside the vocabulary, or there are
                not as many numbers of tokens as prompts.
        """
        module = self._writer()
        check_options("generate_many", settings, ("temperature", "top_k", "top_p", "greedy"))
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
            raise wrong_kind("prompts", "a list of texts, or of ids (T,)", prompts)
        wanted: list[Any] = list(prompts)
        counts = list(tokens) if isinstance(tokens, Iterable) else [tokens] * len(wanted)
        if len(counts) != len(wanted):
            raise ValueError(
                "tokens must be one number or one for each prompt: "
                f"got {len(counts)} for {len(wanted)} prompts"
            )
        read = [
            self._encode(each, unknown) if isinstance(each, str) else (None, np.asarray(each))
            for each in wanted
        ]
        requests = [
            Request(ids, count, seed_key(seed + number))
            for number, ((_, ids), count) in enumerate(zip(read, counts, strict=True))
        ]
        texts = generate_requests(
            module, requests, rows=rows, stop_tokens=self._stop_tokens(module),
            **{"temperature": 0.8, **settings},
        )  # fmt: skip

        def results() -> Iterator[tuple[int, Any]]:
            for number, made in texts:
                tokenizer, ids = read[number]
                if tokenizer is None:
                    yield number, made
                else:
                    pieces = decode_stream(tokenizer, ids, [made[None]], self._last_ids())
                    yield number, "".join(pieces)

        return results()

    def _encode(self, prompt: str, unknown: Unknown) -> tuple[Tokenizer, np.ndarray]:
        """Returns the tokenizer, and the ids of a text that the model is to read.

        Raises:
            UsageError: it reads none, or has no tokenizer.
            TextError: the text has a character that the tokenizer does not know.
        """
        if isinstance(self.module, VisionTransformer | DualEncoder):
            kind = type(self.module).__name__
            raise UsageError(f"this {kind} reads images, and writes no text")
        self._check_reads_tokens()
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise UsageError(
                "the model has no tokenizer: load it with ",
                Setting("meta"),
                ", or give and get ids instead of text",
            )
        first = [] if self._source is None else self._source.first_ids()
        if isinstance(self.module, EncoderDecoder):
            return tokenizer, encode_source(tokenizer, prompt, (), unknown).ids
        return tokenizer, encode_prompt(tokenizer, prompt, (), first, unknown).ids

    def _writer(self) -> TransformerLM:
        """Returns the module, a language model that writes.

        Raises:
            UsageError: it is none.
        """
        module, config = self.module, self.config
        if not isinstance(module, TransformerLM) or not isinstance(config, TransformerLMConfig):
            raise UsageError(
                f"this {type(module).__name__} writes no text by itself: only a language model does"
            )
        if not config.causal or config.head.head == "none":
            raise UsageError("only a causal language model with a head writes text")
        return module

    def _stop_tokens(self, module: TransformerLM) -> list[int]:
        return [i for i in self._last_ids() if 0 <= i < (module.config.vocab_size or 0)]

    def _chunks(
        self,
        prompt_BT: np.ndarray,
        tokens: int,
        *,
        seed: int = 0,
        draft: "TextModel | None" = None,
        draft_tokens: int = 4,
        **settings: Any,
    ) -> Iterator[np.ndarray]:
        module, config = self.module, self.config
        self._check_reads_tokens()
        if not isinstance(draft, TextModel | None):
            raise wrong_kind("draft", "a Model", draft)
        if draft is not None and not all(
            isinstance(m, TransformerLM) for m in (module, draft.module)
        ):
            raise UsageError("only a language model has a draft, which is one too")
        writes = isinstance(config, EncoderDecoderConfig) and config.causal
        if isinstance(module, EncoderDecoder) and writes and module.config.head.head != "none":
            return iter([self._target(module, prompt_BT, tokens, seed=seed, **settings)])
        if not isinstance(module, TransformerLM) or not isinstance(config, TransformerLMConfig):
            raise UsageError(
                f"this {type(module).__name__} writes no text: only a language model does, or an "
                "encoder with a causal decoder and a head"
            )
        module = self._writer()
        settings = {"temperature": 0.8, **settings}
        write = functools.partial(stream, module)
        if draft is not None:
            assert isinstance(draft.module, TransformerLM)
            write = functools.partial(
                stream_with_draft, module, draft.module, draft_tokens=draft_tokens
            )
        return write(
            prompt_BT,
            tokens,
            key=seed_key(seed),
            stop_tokens=self._stop_tokens(module),
            **settings,
        )

    def _target(
        self, module: EncoderDecoder, source_BS: np.ndarray, tokens: int, *, seed: int, **more: Any
    ) -> np.ndarray:
        """Returns the targets of sources, int32 (B, n)."""
        begin, last = ([], None) if self._source is None else self._source.target_ids()
        return write_target(
            module,
            source_BS,
            tokens,
            begin=begin,
            last_ids=self._last_ids(),
            last_token=last,
            key=seed_key(seed),
            **{"temperature": 0.8, **more},
        )


def _as_array(prompt: Ids) -> np.ndarray:
    """Returns the ids of a prompt, or of several.

    Raises:
        UsageError: they are of several lengths.
    """
    try:
        return np.asarray(prompt)
    except ValueError:
        raise UsageError(
            "the prompts of one call have one length: generate_many takes those of several"
        ) from None


# The settings of ``stream``, which ``generate`` takes too.
STREAMING = [
    name
    for name in inspect.signature(TextModel.stream).parameters
    if name not in ("self", "prompt", "tokens")
]
