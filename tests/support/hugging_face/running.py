"""Tiny random models of transformers, and both sides run so that their numbers can be compared.

transformers computes norms, softmax and tables of positions in float32 whatever the dtype of the
model, and jaxformer computes its tables in float32 as well. In ``in_float64`` all of it is
float64, on both sides and each by its own code. What is left is the mathematics: that of the
tables too, which are not shared. In ``in_float32`` the tables are as users have them, and the
rest is float64: what differs then are the tables' last bits.
"""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from jaxformer import blocks, position_tables, positions
from jaxformer.blocks import Block
from jaxformer.dual_encoder import DualEncoder
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.execution.shared_traces import share_traces
from jaxformer.porting.formats.arrays import to_stored_tensors
from jaxformer.speech_classifier import SpeechClassifier
from jaxformer.speech_transformer import SpeechTransformer
from jaxformer.vision_transformer import VisionTransformer
from tests.support.hugging_face.case import BATCH, LENGTH, SIZES, VOCAB, Case

# The modules of jaxformer that compute tables of positions.
TABLE_MODULES = (position_tables, positions)
# Where transformers computes ALiBi's slopes or biases.
ALIBI = {
    modeling_bloom: "_get_alibi_slopes",
    modeling_falcon: "build_alibi_tensor",
    modeling_mpt: "build_mpt_alibi_tensor",
}
_FLOAT32 = torch.float32


def build(
    kind: str, settings: Mapping[str, Any], *, attention: str = "eager", **arguments: Any
) -> Any:
    """A model of transformers in evaluation mode, from what a config.json holds.

    It is in float32, within ``in_float64`` in float64.
    """
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    # Through JSON, as from a file.
    config = cls.config_class.from_dict(
        json.loads(json.dumps(settings)), attn_implementation=attention
    )
    # The usual one for experts takes no float64.
    config._experts_implementation = "eager"
    return cls(config, **arguments).eval()


def build_case(case: Case) -> Any:
    """The model of a case with its first weights, in float64, its tables in float32."""
    return exact(_build_case(case).double())


def build_exact(case: Case, weights: Mapping[str, torch.Tensor]) -> Any:
    """The model of a case with these weights, its tables in float64 too."""
    with in_float64():
        model = _build_case(case).double()
    model.load_state_dict(weights)
    return model


def _build_case(case: Case) -> Any:
    settings = {**case.usual, **case.settings}
    return build(case.kind, settings, attention=case.attention, **case.arguments)


def randomize(
    model: Any, std: float = 0.3, embeddings: float = 1.0, copies: Mapping[str, str] | None = None
) -> Any:
    """Every parameter moved away from where it began, those of norms too.

    Args:
        model: of transformers, float64.
        std: how far.
        embeddings: a factor on what has a row or an entry for every token.
        copies: see ``Case``.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Marian's sinusoids are parameters that are not trained.
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=generator).double() * std)
            if parameter.ndim and parameter.shape[0] == VOCAB:
                parameter.mul_(embeddings)
        for buffer in ported_buffers(model).values():
            buffer.add_(torch.randn(buffer.shape, generator=generator).double() * std * embeddings)
        for copy, used in (copies or {}).items():
            model.get_parameter(copy).copy_(model.get_parameter(used))
    return model


def ported_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Buffers by their names that are parameters in jaxformer.

    They are BART's bias of the logits, and what DeepSeek-V3 adds to the scores of experts, which no
    gradient changes on either side.
    """
    names = ("final_logits_bias", "e_score_correction_bias")
    return {name: b for name, b in model.named_buffers() if name.rpartition(".")[2] in names}


def exact(model: Any) -> Any:
    """Gemma's factor of the embeddings in float64, which it keeps as a float32 buffer."""
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
    return model


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """What transformers calls float32 is float64, but for its tables of positions.

    Those that it computes in every call are float32 too, their angles as well as their frequencies,
    and so are ALiBi's biases. Those of jaxformer always are.
    """
    call = torch.nn.Module.__call__

    def call_table(module: Any, *arguments: Any, **more: Any) -> Any:
        is_table = type(module).__name__.endswith("RotaryEmbedding")
        with _torch_in(_FLOAT32) if is_table else contextlib.nullcontext():
            return call(module, *arguments, **more)

    with contextlib.ExitStack() as stack:
        _forget_tables()
        stack.callback(_forget_tables)
        stack.enter_context(_torch_in(torch.float64))
        stack.enter_context(mock.patch.object(torch.nn.Module, "__call__", call_table))
        for module, name in ALIBI.items():
            biases = _torch_in(_FLOAT32)(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, biases))
        yield


@contextlib.contextmanager
def _torch_in(dtype: torch.dtype) -> Iterator[None]:
    """What PyTorch calls float32 is of this dtype, and so are numbers that have none."""
    before = torch.get_default_dtype()
    with (
        mock.patch.object(torch, "float32", dtype),
        mock.patch.object(torch, "float", dtype),
        mock.patch.object(torch.Tensor, "float", lambda array: array.to(dtype)),
    ):
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """What both sides call float32 is float64, in the tables of positions too.

    A model of transformers must be built and run within. What is called bfloat16 stays so: Falcon
    rounds its biases to it in every dtype, and jaxformer does the same.
    """
    with contextlib.ExitStack() as stack:
        # Tables that were computed before, and those that are computed within, are of no use.
        _forget_tables()
        stack.callback(_forget_tables)
        stack.enter_context(_torch_in(torch.float64))
        stack.enter_context(wide_slopes())
        for module in TABLE_MODULES:
            for name in vars(module).keys() & {"np", "jnp"}:
                wide = _Wide(getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, wide))
        kept = mock.patch.object(jax.lax, "reduce_precision", lambda x, exponent, mantissa: x)
        stack.enter_context(kept)
        yield


class _Wide:
    """A module of arrays, whose float32 is float64."""

    def __init__(self, module: Any):
        self._module = module
        self.float32 = module.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _forget_tables() -> None:
    for module in TABLE_MODULES:
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def _wide_slopes(num_heads: int, max_bias: float = 8.0) -> np.ndarray:
    return _SLOPES(num_heads, max_bias).astype(np.float64)


_SLOPES = positions.alibi_slopes


@contextlib.contextmanager
def wide_slopes() -> Iterator[None]:
    """ALiBi's slopes have the same values in float64."""
    with mock.patch.object(positions, "alibi_slopes", _wide_slopes):
        yield


def source_tables(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """The cosines and sines that transformers computes, in the form of ``rotary_tables``."""
    module = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    x = torch.zeros((), dtype=torch.float32)
    cos, sin = module(x, torch.arange(SIZES["max_position_embeddings"])[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].numpy(), sin[0, :, :half].numpy()


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
