"""Who attends to whom in a text, as numbers and as what a notebook shows."""

import base64
import importlib.util
import io
from collections.abc import Sequence
from html import escape
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from jaxformer import analysis
from jaxformer.config import EncoderDecoderConfig
from jaxformer.data.text_generation import encode_source, write_target
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.errors import Setting, UsageError
from jaxformer.inspection.inspected_model import (
    InspectedModel,
    Numbers,
    Unknown,
    check_ids,
    text_and_ids,
)

Kind = Literal["encoder", "decoder", "cross"]
Head = int | Literal["mean", "all"]
# Of a target that the model itself writes.
TARGET_TOKENS = 40


class AttentionMaps:
    """The attention weights of a text; a notebook shows them as a picture.

    Args:
        numbers: what ``attention`` returned.

    Attributes:
        tokens: the queries.
        keys: what they attend to: the same tokens, or those of the source.
        layers: their indices.
        heads: their indices, or ``mean``.
        weights: float32 or wider, (layers, heads, queries, keys); 0 where nothing may be seen.
    """

    def __init__(self, numbers: Numbers):
        self._numbers = numbers
        self.tokens: Sequence[str] = numbers["tokens"]
        self.keys: Sequence[str] = numbers.get("keys") or self.tokens
        self.layers: Sequence[int] = numbers["layers"]
        self.heads: Sequence[int | str] = numbers["heads"]
        self.weights: np.ndarray = numbers["weights"]

    def __repr__(self) -> str:
        """Returns their sizes, in one line."""
        return (
            f"<AttentionMaps: {len(self.layers)} layers, heads "
            f"{', '.join(map(str, self.heads))}, {len(self.tokens)} queries of "
            f"{len(self.keys)} keys>"
        )

    def _repr_html_(self) -> str:
        """Returns the picture for a notebook; without matplotlib the sizes alone."""
        text = f"<p>{escape(repr(self)[1:-1])}</p>"
        if importlib.util.find_spec("matplotlib") is None:
            return text
        from jaxformer.inspection.pictures import save_picture

        file = io.BytesIO()
        save_picture("attention", self._numbers, file)
        data = base64.b64encode(file.getvalue()).decode()
        return f'{text}<img alt="attention maps" src="data:image/png;base64,{data}">'


def attention(
    run: InspectedModel,
    *,
    text: str | None = None,
    target: str | None = None,
    kind: Kind | None = None,
    unknown: Unknown = "error",
    layer: int | None = None,
    head: Head = "mean",
) -> Numbers:
    """Returns the attention maps of a text, ``weights`` (L, N, queries, keys).

    Args:
        run: the model.
        text: what it reads; None lets a language model write one.
        target: of an encoder and decoder, what it has written; None lets it write.
        kind: which attention of an encoder and decoder; None is that of the target to the source.
        unknown: see ``CharTokenizer.encode``.
        layer: which, from 0; None gives every layer.
        head: which, from 0; their mean; or all.

    Raises:
        UsageError: there is no such layer or head, the text is too long, or a setting belongs to
            the other kind of model.
        TextError: the text has a character that the model does not know.
    """
    if isinstance(run.module, EncoderDecoder):
        return _of_sequences(run, run.module, text, target, kind or "cross", unknown, layer, head)
    for name, value in (("target", target), ("kind", kind)):
        if value is not None:
            raise UsageError(Setting(name), " is of encoders and decoders: this model has neither")
    config = run.config
    chosen = _check(config.num_layers, config.attention.num_heads, layer, head)
    text, ids = text_and_ids(run, text, unknown)
    maps = analysis.attention_maps(run.model, jnp.asarray(ids)[None], layer=layer, head=chosen)
    return {
        "text": text,
        "tokens": [run.tokenizer.decode([i]) for i in ids],
        **_arrange(maps, config.num_layers, config.attention.num_heads, layer, head),
    }


def _of_sequences(
    run: InspectedModel,
    module: EncoderDecoder,
    text: str | None,
    target: str | None,
    kind: Kind,
    unknown: Unknown,
    layer: int | None,
    head: Head,
) -> Numbers:
    if kind not in get_args(Kind):
        raise UsageError(Setting("kind"), f" must be {' or '.join(get_args(Kind))}: got {kind!r}")
    config = module.config
    of_encoder = kind == "encoder"
    heads = (config.encoder if of_encoder else config).attention.num_heads
    layers = config.num_encoder_layers if of_encoder else config.num_decoder_layers
    chosen = _check(layers, heads, layer, head)
    source_S = encode_source(run.tokenizer, text or "", (), unknown).ids
    check_ids("text", source_S, config.source_vocab_size)
    target_T = _target_ids(run, module, source_S, target, unknown)
    check_ids("target", target_T, config.target_vocab_size)
    _check_length(config, len(source_S), len(target_T))
    maps = analysis.sequence_attention_maps(
        module, jnp.asarray(source_S)[None], jnp.asarray(target_T)[None]
    )[kind]
    maps = maps if layer is None else maps[layer]
    if chosen is not None:
        maps = maps.mean(axis=-3) if chosen == "mean" else maps[..., chosen, :, :]
    source, written = (_names(run, ids) for ids in (source_S, target_T))
    return {
        "text": text,
        "kind": kind,
        "tokens": source if of_encoder else written,
        "keys": written if kind == "decoder" else source,
        **_arrange(maps, layers, heads, layer, head),
    }


def _target_ids(
    run: InspectedModel,
    module: EncoderDecoder,
    source_S: np.ndarray,
    target: str | None,
    unknown: Unknown,
) -> np.ndarray:
    """Returns the ids of a target with those that it begins with."""
    begin, last = run.target_ids
    if target is not None:
        ids = run.tokenizer.encode(target, unknown=unknown)
        return np.concatenate([np.array(begin, np.int64), ids])
    count = min(TARGET_TOKENS, module.config.context_length - len(begin))
    made = write_target(
        module, source_S[None], count, begin=begin, last_ids=run.last_ids, last_token=last,
        greedy=True,
    )[0]  # fmt: skip
    return np.concatenate([np.array(begin, np.int64), made])


def _check_length(config: EncoderDecoderConfig, *lengths: int) -> None:
    if max(lengths) > config.context_length:
        raise UsageError(
            Setting("text"),
            f" and its target must have at most {config.context_length} tokens: got "
            f"{lengths[0]} and {lengths[1]}",
        )


def _names(run: InspectedModel, ids: np.ndarray) -> list[str]:
    """Returns the text of each token; of a special token, which has none, its id."""
    return [run.tokenizer.decode([i]) or f"<{i}>" for i in ids]


def _check(layers: int, heads: int, layer: int | None, head: Head) -> int | Literal["mean"] | None:
    """Returns the head as ``analysis`` takes it."""
    if layer is not None and not _is_index(layer, layers):
        raise UsageError(Setting("layer"), f" must be in [0, {layers}): got {layer!r}")
    if head not in ("mean", "all") and not _is_index(head, heads):
        raise UsageError(Setting("head"), f" must be in [0, {heads}), mean or all: got {head!r}")
    return None if head == "all" else head


def _is_index(value: Any, count: int) -> bool:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_integer and bool(0 <= value < count)


def _arrange(maps: np.ndarray, layers: int, heads: int, layer: int | None, head: Head) -> Numbers:
    """Returns the maps as (layers, heads, queries, keys), and which layers and heads they are."""
    numbers = list(range(layers)) if layer is None else [layer]
    chosen = list(range(heads)) if head == "all" else [head]
    shape = (len(numbers), len(chosen), *maps.shape[-2:])
    return {"layers": numbers, "heads": chosen, "weights": maps.reshape(shape)}
