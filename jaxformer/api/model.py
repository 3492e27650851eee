"""``Model``: a module with its tokenizer, which writes text and is saved in any format."""

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import jax
import numpy as np

from jaxformer.char_data import CharTokenizer, Unknown
from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.config_dual_encoder import DualEncoderConfig
from jaxformer.config_speech import SpeechClassifierConfig
from jaxformer.config_vision import VisionTransformerConfig
from jaxformer.continuous_generation import Request, generate_requests
from jaxformer.data.text_generation import (
    decode_stream,
    encode_prompt,
    encode_source,
    write_target,
)
from jaxformer.data.tokenizers import HuggingFaceTokenizer
from jaxformer.dual_encoder import DualEncoder
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.errors import Setting, UsageError
from jaxformer.generation import stream
from jaxformer.hardware.units import format_count
from jaxformer.inspection.attention_maps import AttentionMaps, Head, Kind, attention
from jaxformer.inspection.expert_load import experts
from jaxformer.inspection.inspected_model import InspectedModel
from jaxformer.inspection.narrowing_cost import NarrowingCost, narrowing_cost
from jaxformer.narrow_linear import is_narrow, narrow_weights
from jaxformer.parameters import get_parameters, merge, split
from jaxformer.porting.api import build
from jaxformer.porting.checkpoint import Checkpoint, Tokenizer, in_float32, open_checkpoint
from jaxformer.porting.formats.raw_checkpoints import RawCheckpoint
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG
from jaxformer.porting.port import plan_port, write_port
from jaxformer.porting.targets import choose_target
from jaxformer.speculative_generation import stream_with_draft
from jaxformer.speech_classifier import SpeechClassifier
from jaxformer.transformer_lm import TransformerLM
from jaxformer.vision_transformer import VisionTransformer

Ids = Sequence[int] | np.ndarray


class Model:
    """A model with its tokenizer: it writes text, and is saved in any format.

    Args:
        module: the NNX module; it may be trained further, and is saved as it then is.
        tokenizer: makes ids of text and text of ids. Without one the model reads and writes ids.

    Attributes:
        module: as given.

    Raises:
        UsageError: the module is none of the whole models.
    """

    def __init__(
        self,
        module: TransformerLM | EncoderDecoder | VisionTransformer | DualEncoder | SpeechClassifier,
        tokenizer: Tokenizer | None = None,
    ):
        if type(module) not in MODEL_OF_CONFIG.values():
            known = " or ".join(cls.__name__ for cls in MODEL_OF_CONFIG.values())
            raise UsageError(f"a Model holds a {known}: got {type(module).__name__}")
        self.module = module
        self._tokenizer = tokenizer
        # Where it was loaded from, and whose names its arrays had there.
        self._source: Checkpoint | None = None
        self._origin: Mapping[str, Any] = {}

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> "Model":
        """Returns the model of an open checkpoint; see ``load``."""
        plan = checkpoint.plan()
        if type(plan.module) not in MODEL_OF_CONFIG.values():
            raise UsageError(
                f"{checkpoint.path} holds a {plan.origin.kind}, which is a part of a model: give "
                "its arrays to jaxformer.from_torch"
            )
        holds_float64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        model = cls(build(plan if holds_float64 else in_float32(plan)))
        model._source, model._origin = checkpoint, checkpoint.origin_of(plan)
        return model

    @property
    def config(
        self,
    ) -> (
        TransformerLMConfig
        | EncoderDecoderConfig
        | VisionTransformerConfig
        | DualEncoderConfig
        | SpeechClassifierConfig
    ):
        """The settings of the module."""
        return self.module.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the model has none.

        Raises:
            UsageError: it needs a package that is not installed.
            TextError: it does not fit the model.
        """
        if self._tokenizer is None and self._source is not None:
            config = self.config
            if isinstance(config, TransformerLMConfig):
                self._tokenizer = self._source.tokenizer(config.vocab_size or 0)
            elif isinstance(config, EncoderDecoderConfig):
                self._tokenizer = self._source.tokenizer(config.target_vocab_size)
            elif isinstance(config, DualEncoderConfig):
                self._tokenizer = self._source.tokenizer(config.text.vocab_size or 0)
        return self._tokenizer

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
            UsageError: the model cannot write, or has no tokenizer for a text.
            TextError: the prompt has a character that the tokenizer does not know.
            ValueError: a setting is out of its range, or an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            return "".join(self.stream(prompt, tokens, **settings))
        ids = np.asarray(prompt)
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
        draft: "Model | None" = None,
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
            seed: the same seed makes the same text.
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
            UsageError: the model is no language model that writes, or has no tokenizer for a text.
            TextError: a prompt has a character that the tokenizer does not know.
            ValueError: a setting is out of its range, an id outside the vocabulary, or there are
                not as many numbers of tokens as prompts.
        """
        module = self._writer()
        counts = [tokens] * len(prompts) if isinstance(tokens, int) else list(tokens)
        if len(counts) != len(prompts):
            raise ValueError(
                "tokens must be one number or one for each prompt: "
                f"got {len(counts)} for {len(prompts)} prompts"
            )
        read = [
            self._encode(each, unknown) if isinstance(each, str) else (None, np.asarray(each))
            for each in prompts
        ]
        requests = [
            Request(ids, count, jax.random.key(seed + number))
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

    def for_writing(self, dtype: str) -> "Model":
        """Returns the same model with its weights stored narrower, which is read, not trained.

        It writes with every method of this class, is a ``draft``, and takes less memory once this
        model is dropped. See ``jaxformer.narrow_weights`` for what is narrow and what is not, and
        ``narrowing_cost`` for what it costs.

        Args:
            dtype: ``bfloat16`` or ``int8``.

        Raises:
            ValueError: the dtype is another, or a weight is not finite.
        """
        narrow = Model(narrow_weights(self.module, dtype), self._tokenizer)
        narrow._source, narrow._origin = self._source, self._origin
        return narrow

    def narrowing_cost(
        self, dtype: str, text: str | Ids, *, tokens: int = 100, unknown: Unknown = "error"
    ) -> NarrowingCost:
        """Returns how ``for_writing(dtype)`` differs from this model on a text; ``print`` it.

        Args:
            dtype: ``bfloat16`` or ``int8``.
            text: a text, or its ids (T,); the longer, the more it says.
            tokens: how many tokens both write greedily after the text's beginning.
            unknown: see ``stream``.

        Raises:
            UsageError: this is no language model that writes, or the text has fewer than two
                tokens.
            TextError: the text has a character that the tokenizer does not know.
            ValueError: see ``for_writing``.
        """
        module = self._writer()
        ids = self._encode(text, unknown)[1] if isinstance(text, str) else np.asarray(text)
        return narrowing_cost(module, narrow_weights(module, dtype), ids, num_tokens=tokens)

    def attention(
        self,
        text: str | None = None,
        *,
        target: str | None = None,
        kind: Kind | None = None,
        layer: int | None = None,
        head: Head = "mean",
        unknown: Unknown = "error",
    ) -> AttentionMaps:
        """Returns who attends to whom in a text; a notebook shows it as a picture.

        Args:
            text: what the model reads; None lets a language model write one.
            target: of an encoder and decoder, what it has written; None lets it write.
            kind: which attention of an encoder and decoder: ``encoder``, ``decoder`` or, as by
                default, ``cross``: that of the target to the source.
            layer: which, from 0; None gives every layer.
            head: which, from 0; their mean; or ``all``.
            unknown: what to do with characters that the model does not know.

        Raises:
            UsageError: there is no such layer or head, the text is too long, or the model has no
                tokenizer.
            TextError: the text has a character that the tokenizer does not know.
        """
        if isinstance(self.module, VisionTransformer | DualEncoder):
            raise UsageError(
                f"this {type(self.module).__name__} reads images: call the module that sees them "
                "with return_weights=True"
            )
        self._check_reads_tokens()
        return AttentionMaps(
            attention(
                self._inspected(), text=text, target=target, kind=kind, layer=layer, head=head,
                unknown=unknown,
            )
        )  # fmt: skip

    def expert_load(self, text: str | None = None, *, unknown: Unknown = "error") -> dict[str, Any]:
        """Returns which experts compute a text: the numbers of ``jaxformer inspect experts``.

        Args:
            text: what the model reads; None lets it write one.
            unknown: what to do with characters that the model does not know.

        Returns:
            ``layers`` (L), those with experts; ``load`` (L, E), the share of tokens that each
            expert computes; ``probability`` (L, E), its mean probability; ``choices`` and
            ``weights`` (L, T, C) of each token; ``balance`` (L), C where all experts are used
            alike; ``text`` and its ``tokens`` (T).

        Raises:
            UsageError: the model has no experts or no tokenizer, or the text is too long.
            TextError: the text has a character that the tokenizer does not know.
        """
        if not isinstance(self.module, TransformerLM):
            raise UsageError(
                f"experts are inspected in language models: this is {type(self.module).__name__}"
            )
        return experts(self._inspected(), text=text, unknown=unknown)

    def _inspected(self) -> InspectedModel:
        targets = ([], None) if self._source is None else self._source.target_ids()
        # A copy that shares the arrays: the module itself may be in training mode.
        module = merge(*split(self.module))
        module.eval()
        return InspectedModel(module, self.tokenizer, targets, tuple(self._last_ids()))

    def save(
        self,
        path: str | Path,
        format: Literal["torch", "jax", "hf", "peft"] | None = None,
        *,
        dialect: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Writes the model, reads it back and compares, as ``jaxformer port`` does.

        Args:
            path: ``NAME.safetensors``, ``NAME.pt``, or a folder. A certificate of every array is
                written into the folder, or beside the file.
            format: a PyTorch file, a run's folder, a Hugging Face folder, or PEFT's folder, which
                has the adapters alone; default by the name. All but PEFT's, and files with
                jaxformer's or torch_ref's names, have the adapters in their weights.
            dialect: whose names the arrays get; default those that they came with, else
                torch_ref's.
            dtype: what the weights are rounded to; default their own.
            overwrite: replace what an earlier ``save`` has written.

        Returns:
            The path.

        Raises:
            UsageError: something is there already, no dialect can hold the model, or it is one of
                ``for_writing``.
            ResourceError: the disk is full or may not be written to.
        """
        path = Path(path)
        if is_narrow(self.module):
            raise UsageError("narrow weights are for writing text: save the model that had its own")
        target = choose_target(path, format, overwrite=overwrite, dialect=dialect, dtype=dtype)
        port = plan_port(self._checkpoint(path), target)
        write_port(port, source="a model in memory", command=f"{self!r}.save({str(path)!r})")
        return path

    def __repr__(self) -> str:
        """Returns what the model is, in one line."""
        count = sum(array.size for array in get_parameters(self.module).values())
        origin = "" if self._source is None else f", from {self._source.path}"
        kind = type(self.module).__name__
        return f"<Model: {kind}, {format_count(count)} parameters{origin}>"

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

    def _check_reads_tokens(self) -> None:
        """Checks that the model reads tokens.

        Raises:
            UsageError: it reads features.
        """
        if isinstance(self.module, SpeechClassifier):
            raise UsageError("this SpeechClassifier reads features and no text: call its module")
        if isinstance(self.config, EncoderDecoderConfig) and self.config.reads_features:
            raise UsageError(
                f"this {type(self.module).__name__} reads features and no text: give them to "
                "jaxformer.generate_target"
            )

    def _chunks(
        self,
        prompt_BT: np.ndarray,
        tokens: int,
        *,
        seed: int = 0,
        draft: "Model | None" = None,
        draft_tokens: int = 4,
        **settings: Any,
    ) -> Iterator[np.ndarray]:
        module, config = self.module, self.config
        self._check_reads_tokens()
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
            key=jax.random.key(seed),
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
            key=jax.random.key(seed),
            **{"temperature": 0.8, **more},
        )

    def _last_ids(self) -> list[int]:
        return [] if self._source is None else self._source.last_ids()

    def _checkpoint(self, path: Path) -> Checkpoint:
        """Returns the module, as it is now, in the form in which ports read a checkpoint."""
        source = self._source
        tokenizer, vocabulary, file = self._tokenizer, None, None
        companions: Mapping[str, Path] = {}
        record: dict[str, Any] = {"dialect": "jaxformer", "config": self.config.settings()}
        if source is not None:
            companions, vocabulary = source.files_beside(), source.vocabulary
            file = source.tokenizer_file
            record |= {"origin": dict(self._origin), "token_ids": source.token_ids}
            if source.base is not None:
                record["init_from"] = source.base
        if isinstance(tokenizer, CharTokenizer):
            vocabulary = "".join(tokenizer.vocabulary)
        elif isinstance(tokenizer, HuggingFaceTokenizer):
            file = tokenizer.path
        tensors = {
            name: StoredTensor.of(np.asarray(array))
            for name, array in get_parameters(self.module).items()
        }
        raw = RawCheckpoint("run", (), tensors, record, tuple(companions.values()))
        return Checkpoint(
            path, raw, "jaxformer", self.config, vocabulary, file, record.get("token_ids", {})
        )


def load(path: str | Path, **options: Any) -> Model:
    """Loads a model from a checkpoint of any format.

    Weights in float64 are rounded to float32 unless JAX is set to hold float64.

    Args:
        path: a run's folder, a ``.safetensors`` or ``.pt`` file, a Hugging Face folder, or PEFT's
            folder of adapters.
        options: ``dialect``, ``config``, ``meta``, ``step``, ``best``, ``ignore``, ``force`` and
            ``base`` of ``jaxformer.porting.open_checkpoint``.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: it is missing, damaged, or its arrays do not fit; all problems are listed.
        UnsafeFileError: opening it could do harm.
        UsageError: its dialect or a setting is unknown, or it holds a part of a model alone.
        ResourceError: it cannot be read.
    """
    checkpoint = open_checkpoint(path, **options)
    for warning in checkpoint.raw.warnings:
        warnings.warn(warning, stacklevel=2)
    return Model.of_checkpoint(checkpoint)
