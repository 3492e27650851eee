"""jaxformer modules with the call signatures of ``torch.nn``.

Each is a subclass of the component that it replaces, with the same parameters at the same paths, or
has such (``Seq2Seq``). They have a ``batch_first`` of their own: inputs and outputs are
(T, B, D) where it is False, torch's default. Masks are boolean, True = may attend, where
torch's are True = may not; ``src_mask`` and the like are (T, S), (B·N, T, S) or broadcastable to
(B, N, T, S), padding masks (B, S). ``is_causal`` adds the causal mask to the given ones. With
``return_weights=True`` the weights come back too, those of each head.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import PostNormBlock, PreNormBlock
from jaxformer.encoder_decoder import Decoder, Encoder
from jaxformer.masks import causal_mask, combine_masks

Tokens = Float[Array, "A B D"]
Mask = Bool[Array, "..."] | None
Padding = Bool[Array, "B S"] | None


class TorchAttention(MultiHeadAttention):
    """``nn.MultiheadAttention``."""

    batch_first = False

    def __call__(  # type: ignore[override]
        self,
        query: Tokens,
        key: Tokens,
        value: Tokens,
        key_padding_mask: Padding = None,
        need_weights: bool = True,
        attn_mask: Mask = None,
        average_attn_weights: bool = False,
        is_causal: bool = False,
        *,
        return_weights: bool = False,
    ) -> Any:
        """Attends from ``query`` to ``key``.

        Args:
            query: the inputs of the query projection.
            key: the inputs of the key projection.
            value: the inputs of the value projection.
            key_padding_mask: which keys may be attended to.
            need_weights: not used; it keeps the order of arguments. ``return_weights`` decides.
            attn_mask: which query may attend to which key.
            average_attn_weights: whether the returned weights are the mean over heads, (B, T, S);
                torch's default is True.
            is_causal: whether later keys are masked too.
            return_weights: whether to return the weights too.
        """
        q, k, v = (_batch_first(x, self.batch_first) for x in (query, key, value))
        mask = _join_masks(q, k.shape[1], self.num_heads, attn_mask, key_padding_mask, is_causal)
        result = super().__call__(q, k, v, mask, return_weights=return_weights)
        if return_weights and average_attn_weights:
            result = result[0], result[1].mean(axis=1)
        return _restore_layout(result, self.batch_first)


class _EncoderLayer:
    """The call of ``nn.TransformerEncoderLayer``."""

    batch_first = False
    attention: MultiHeadAttention

    def __call__(
        self,
        src: Tokens,
        src_mask: Mask = None,
        src_key_padding_mask: Padding = None,
        is_causal: bool = False,
        *,
        return_weights: bool = False,
    ) -> Any:
        """Returns the layer's output."""
        x = _batch_first(src, self.batch_first)
        heads = self.attention.num_heads
        mask = _join_masks(x, x.shape[1], heads, src_mask, src_key_padding_mask, is_causal)
        result = super().__call__(x, mask, return_weights=return_weights)  # type: ignore[misc]
        return _restore_layout(result, self.batch_first)


class PreNormEncoderLayer(_EncoderLayer, PreNormBlock):  # type: ignore[misc]
    """``nn.TransformerEncoderLayer(norm_first=True)``."""


class PostNormEncoderLayer(_EncoderLayer, PostNormBlock):  # type: ignore[misc]
    """``nn.TransformerEncoderLayer(norm_first=False)``."""


class _DecoderLayer:
    """The call of ``nn.TransformerDecoderLayer``."""

    batch_first = False
    attention: MultiHeadAttention

    def __call__(
        self,
        tgt: Tokens,
        memory: Tokens,
        tgt_mask: Mask = None,
        memory_mask: Mask = None,
        tgt_key_padding_mask: Padding = None,
        memory_key_padding_mask: Padding = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        return_weights: bool = False,
    ) -> Any:
        """Returns the layer's output."""
        x, memory = (_batch_first(each, self.batch_first) for each in (tgt, memory))
        heads = self.attention.num_heads
        result = super().__call__(  # type: ignore[misc]
            x,
            _join_masks(x, x.shape[1], heads, tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            memory,
            _join_masks(
                x, memory.shape[1], heads, memory_mask, memory_key_padding_mask, memory_is_causal
            ),
            return_weights=return_weights,
        )
        return _restore_layout(result, self.batch_first)


class PreNormDecoderLayer(_DecoderLayer, PreNormBlock):  # type: ignore[misc]
    """``nn.TransformerDecoderLayer(norm_first=True)``."""


class PostNormDecoderLayer(_DecoderLayer, PostNormBlock):  # type: ignore[misc]
    """``nn.TransformerDecoderLayer(norm_first=False)``."""


class TorchEncoder(Encoder):
    """``nn.TransformerEncoder``."""

    batch_first = False

    def __call__(  # type: ignore[override]
        self,
        src: Tokens,
        mask: Mask = None,
        src_key_padding_mask: Padding = None,
        is_causal: bool | None = None,
        *,
        return_weights: bool = False,
    ) -> Any:
        """Returns the encoded sequence."""
        x = _batch_first(src, self.batch_first)
        heads = self.blocks[0].attention.num_heads
        mask = _join_masks(x, x.shape[1], heads, mask, src_key_padding_mask, is_causal)
        result = super().__call__(x, mask, return_weights=return_weights)
        return _restore_layout(result, self.batch_first)


class TorchDecoder(Decoder):
    """``nn.TransformerDecoder``."""

    batch_first = False

    def __call__(  # type: ignore[override]
        self,
        tgt: Tokens,
        memory: Tokens,
        tgt_mask: Mask = None,
        memory_mask: Mask = None,
        tgt_key_padding_mask: Padding = None,
        memory_key_padding_mask: Padding = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        return_weights: bool = False,
    ) -> Any:
        """Returns the decoded sequence."""
        x, memory = (_batch_first(each, self.batch_first) for each in (tgt, memory))
        heads = self.blocks[0].attention.num_heads
        result = super().__call__(
            x,
            memory,
            _join_masks(x, x.shape[1], heads, tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            _join_masks(
                x, memory.shape[1], heads, memory_mask, memory_key_padding_mask, memory_is_causal
            ),
            return_weights=return_weights,
        )
        return _restore_layout(result, self.batch_first)


class Seq2Seq(nnx.Module):
    """``nn.Transformer``: an encoder and a decoder of vectors, without embeddings or head."""

    def __init__(self, encoder: TorchEncoder, decoder: TorchDecoder):
        self.encoder = encoder
        self.decoder = decoder

    def __call__(
        self,
        src: Tokens,
        tgt: Tokens,
        src_mask: Mask = None,
        tgt_mask: Mask = None,
        memory_mask: Mask = None,
        src_key_padding_mask: Padding = None,
        tgt_key_padding_mask: Padding = None,
        memory_key_padding_mask: Padding = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tokens:
        """Returns the decoded sequence."""
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        return self.decoder(
            tgt,
            memory,
            tgt_mask,
            memory_mask,
            tgt_key_padding_mask,
            memory_key_padding_mask,
            tgt_is_causal,
            memory_is_causal,
        )


def _batch_first(x: Tokens, is_batch_first: bool) -> Float[Array, "B T D"]:
    if x.ndim != 3:
        raise ValueError(f"inputs have three axes, with a batch of at least 1: got {x.shape}")
    return x if is_batch_first else x.swapaxes(0, 1)


def _restore_layout(result: Any, batch_first: bool) -> Any:
    """Returns the output in the layout of the inputs; weights always have the batch first."""
    if isinstance(result, tuple):
        return _restore_layout(result[0], batch_first), result[1]
    return result if batch_first else result.swapaxes(0, 1)


def _join_masks(
    query: Float[Array, "B T D"],
    keys: int,
    num_heads: int,
    mask: Mask,
    padding: Padding,
    causal: bool | None,
) -> Bool[Array, "B N T S"] | None:
    """Returns one mask of an attention mask, a padding mask and the causal mask."""
    batch, queries = query.shape[:2]
    if mask is not None and mask.shape == (batch * num_heads, queries, keys):
        mask = jnp.reshape(mask, (batch, num_heads, queries, keys))
    return combine_masks(
        mask,
        None if padding is None else padding[:, None, None, :],
        causal_mask(queries, keys) if causal else None,
    )
