"""Both sides of a tiny model run, so that their numbers can be compared."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import torch

from jaxformer import blocks
from jaxformer.blocks import Block
from jaxformer.dual_encoder import DualEncoder
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.execution.shared_traces import share_traces
from jaxformer.porting.formats.arrays import to_stored_tensors
from jaxformer.speech_classifier import SpeechClassifier
from jaxformer.speech_transformer import SpeechTransformer
from jaxformer.vision_transformer import VisionTransformer
from tests.support.hugging_face.case import BATCH, LENGTH, VOCAB


def tokens(seed: int = 0, shape: tuple[int, int] = (BATCH, LENGTH)) -> np.ndarray:
    """Ids that are none of the special tokens, on which PyTorch's embeddings get no gradient."""
    return np.random.default_rng(seed).integers(3, VOCAB, shape)


def images(size: tuple[int, int, int], ids: np.ndarray) -> np.ndarray:
    """Images (B, C, Y, X) of this size, in the place of texts, which they depend on."""
    return np.random.default_rng(ids.sum()).standard_normal((len(ids), *size))


def masked_patches(images: np.ndarray, patches: int) -> np.ndarray:
    """About a third of the patches (B, P) of images."""
    return np.random.default_rng(patches).random((len(images), patches)) < 0.3


def features(num_features: int, frames: int, ids: np.ndarray) -> np.ndarray:
    """Features (B, C, T) of sound, in the place of sources, which they depend on."""
    return np.random.default_rng(ids.sum()).standard_normal((len(ids), num_features, frames))


def read_by(model: Any, ids: np.ndarray) -> np.ndarray:
    """What a model of transformers reads in the place of ids: these, images or features."""
    if model.main_input_name == "input_features":
        return features(model.config.num_mel_bins, 2 * model.config.max_source_positions, ids)
    if model.main_input_name != "pixel_values":
        return ids
    config = getattr(model.config, "vision_config", model.config)
    size = config.image_size
    sides = (size, size) if isinstance(size, int) else size
    return images((config.num_channels, *sides), ids)


def is_pair(model: Any) -> bool:
    """Whether a model compares texts with images; Cohere's scale of logits has the same name."""
    return hasattr(model, "logit_scale") and hasattr(model.config, "vision_config")


def pair_images(config: Any, ids: np.ndarray) -> np.ndarray:
    """One image more than there are texts."""
    size = (config.num_channels, config.image_size, config.image_size)
    return images(size, np.concatenate([ids, ids[:1]]))


def _see(model: Any, ids: np.ndarray, is_masked: bool) -> list[torch.Tensor]:
    """What a model that sees makes of images, some of whose patches are masked where they may."""
    pixels = read_by(model, ids)
    embeddings = getattr(model, "embeddings", None)
    more = {}
    if is_masked and getattr(embeddings, "mask_token", None) is not None:
        masked = masked_patches(pixels, embeddings.patch_embeddings.num_patches)
        more["bool_masked_pos"] = torch.as_tensor(masked)
    result = model(torch.as_tensor(pixels).to(next(model.parameters()).dtype), **more)
    for whole in ("logits", "image_embeds"):
        if whole in result:
            return [result[whole]]
    parts = ("pooler", "pre_layrnorm", "head")
    has_pooler = any(getattr(model, part, None) is not None for part in parts)
    return [result.last_hidden_state, *([result.pooler_output] if has_pooler else [])]


def run_source(
    model: Any, ids: np.ndarray, *, is_masked: bool = True, **more: np.ndarray
) -> list[torch.Tensor]:
    """The logits or hidden states, and what is pooled of them.

    Patches are masked, where a model has a row for them, unless ``is_masked`` says otherwise.
    """
    if model.main_input_name == "pixel_values":
        return _see(model, ids, is_masked)
    if is_pair(model):
        pixels = torch.as_tensor(pair_images(model.config.vision_config, ids))
        more = {name: torch.as_tensor(value) for name, value in more.items()}
        dtype = next(model.parameters()).dtype
        return [model(torch.as_tensor(ids), pixels.to(dtype), **more).logits_per_image]
    # The class of an encoder alone says False; None has no effect. Whisper's says nothing.
    if type(model).__name__ == "WhisperForAudioClassification":
        more = {}
    elif type(model.config).is_encoder_decoder and model.config.is_encoder_decoder is not False:
        more["decoder_input_ids"] = target_part(ids)
        if "attention_mask" in more:
            more["decoder_attention_mask"] = target_part(more["attention_mask"])
    more = {name: torch.as_tensor(value) for name, value in more.items()}
    source = torch.as_tensor(read_by(model, ids))
    if source.is_floating_point():
        source = source.to(next(model.parameters()).dtype)
    result = model(source, **more)
    if "logits" in result:
        return [result.logits]
    pooled = result.get("pooler_output")
    if type(model).__name__ == "CLIPTextModel":
        # Of the token that ends a text, which the caller finds.
        pooled = None
    return [result.last_hidden_state, *([] if pooled is None else [pooled])]


def target_part(source: np.ndarray) -> np.ndarray:
    """Ids of the target (B, T), or what is said of them, made of those of the source (B, S).

    They are fewer, and in another order, so that no mix-up of the two passes.
    """
    return np.ascontiguousarray(source[:, ::-1][:, 7:])


def run_target(
    target: Any, ids: np.ndarray, mask: Any = None, *arguments: Any, **more: Any
) -> list[Any]:
    """The same of the jaxformer model."""
    if isinstance(target, VisionTransformer):
        part = target.config.patches
        pixels = images((part.num_channels, part.image_height, part.image_width), np.asarray(ids))
        masked = masked_patches(pixels, part.num_patches)
        use_mask = target.mask_token is not None and target.classifier is None
        dtype = target.patch_embedding.proj.kernel[...].dtype
        result = target(
            jnp.asarray(pixels, dtype), jnp.asarray(masked) if use_mask else None, **more
        )
        pools = any((target.pooler, target.pooled_norm, target.pooling))
        pools = pools and target.classifier is None
        return [result, *([target.pooled(result)] if pools else [])]
    if isinstance(target, DualEncoder):
        part = target.config.vision.patches
        size = (part.num_channels, part.image_height, part.image_width)
        ids = np.asarray(ids)
        pixels = images(size, np.concatenate([ids, ids[:1]]))
        dtype = target.vision.patch_embedding.proj.kernel[...].dtype
        return [target(jnp.asarray(ids), jnp.asarray(pixels, dtype), mask, **more)]
    if isinstance(target, SpeechClassifier):
        part = target.config.features
        given = features(part.num_features, part.num_frames, np.asarray(ids))
        return [target(jnp.asarray(given, target.stem.conv1.proj.kernel[...].dtype))]
    if isinstance(target, EncoderDecoder):
        positions = more.get("positions")
        target_mask = None if mask is None else mask[..., ::-1][..., 7:]
        if isinstance(target, SpeechTransformer):
            config = target.config
            given = features(config.features.num_features, config.num_frames, np.asarray(ids))
            dtype = target.target_embedding.embedding[...].dtype
            target_ids = jnp.asarray(target_part(ids))
            return [target(jnp.asarray(given, dtype), target_ids, None, target_mask)]
        return [
            target(
                jnp.asarray(ids),
                jnp.asarray(target_part(ids)),
                mask,
                target_mask,
                mask,
                source_positions=positions,
                # Counted from the first real token, as those of the source.
                target_positions=None
                if positions is None
                else jnp.maximum(jnp.cumsum(target_mask[:, 0, 0], axis=-1) - 1, 0),
            )
        ]
    result = target(jnp.asarray(ids), mask, *arguments, **more)
    return [result, *([] if target.pooler is None else [target.pooled(result)])]


def stacks_of(target: Any) -> list[int]:
    """How many blocks each stack of a jaxformer model has."""
    if isinstance(target, EncoderDecoder):
        return [len(target.encoder.blocks), len(target.decoder.blocks)]
    if isinstance(target, DualEncoder):
        return [len(target.vision.layers), len(target.text.layers)]
    return [len(target.layers)]


def _stacks_of_source(model: Any, counts: list[int]) -> list[Any]:
    lists = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}
    if repeated := [m for m in model.modules() if type(m).__name__ == "AlbertLayer"]:
        return [repeated]
    if len(counts) == 1:
        return [next(m for m in lists.values() if len(m) == counts[0])]
    if is_pair(model):
        return [model.vision_model.encoder.layers, model.text_model.encoder.layers]
    owners = {name.rpartition(".")[0].rpartition(".")[2]: m for name, m in lists.items()}
    return [owners["encoder"], owners["decoder"]]


@contextlib.contextmanager
def source_states(model: Any, counts: list[int]) -> Iterator[list[torch.Tensor]]:
    """Gives the residual streams before each first block and after all, as they are computed."""
    found: list[torch.Tensor] = []
    stacks = _stacks_of_source(model, counts)
    entered = set()

    def enter(module: Any, arguments: Any, more: Any) -> None:
        # A block that several layers share begins its stack once.
        if module not in entered:
            found.append(arguments[0] if arguments else more["hidden_states"])
        entered.add(module)

    def leave(module: Any, arguments: Any, result: Any) -> None:
        found.append(result[0] if isinstance(result, tuple | list) else result)

    handles = [s[0].register_forward_pre_hook(enter, with_kwargs=True) for s in stacks]
    handles += [block.register_forward_hook(leave) for blocks in stacks for block in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def target_states() -> Iterator[list[Any]]:
    """The same of a jaxformer model."""
    found: list[Any] = []
    kinds: list[Any] = []

    def record(block: Block, call: Any, x: Any, caches: Any) -> Any:
        # A stack has its own length.
        if (kind := (block.cross_attention is None, x.shape[1])) not in kinds:
            kinds.append(kind)
            found.append(x)
        result = call(x, caches)
        found.append(result)
        return result

    def share(run: Any, stack: Any, settings: Any) -> list[Any]:
        calls = share_traces(run, stack, settings)
        pairs = zip(stack, calls, strict=True)
        return [functools.partial(record, block, call) for block, call in pairs]

    # Not in the blocks, of which equal ones share a trace.
    with mock.patch.object(blocks, "share_traces", share):
        yield found


def difference(found: Any, expected: Any, of: str = "") -> float:
    """The largest difference, relative to the largest entry that is expected."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, (of, found.shape, expected.shape)
    scale = np.abs(expected).max()
    assert scale > 0, of
    return float(np.abs(found - expected).max() / scale)


def assert_close(found: Any, expected: Any, tolerance: float, of: str = "") -> None:
    """Every difference is within ``tolerance`` of the largest entry that is expected."""
    assert difference(found, expected, of) <= tolerance, (of, difference(found, expected))


def bits_of(arrays: Any) -> dict[str, tuple[bytes, np.dtype, tuple[int, ...]]]:
    """Bytes, dtype and shape of each array, torch's or numpy's."""
    read = {name: tensor.read() for name, tensor in to_stored_tensors(arrays).items()}
    return {name: (a.tobytes(), a.dtype, a.shape) for name, a in read.items()}
