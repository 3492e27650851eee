"""Tiny random models of transformers, and how they are run so that their numbers can be compared.

transformers computes norms, softmax and rotary tables in float32 whatever the dtype of the model.
``in_float32`` makes float64 of what its code calls float32, and ``same_tables`` gives it
jaxformer's rotary tables and ALiBi slopes, whose last bits differ from library to library. What is
left is the mathematics.
"""

import contextlib
import json
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from transformers.models.bloom import modeling_bloom

from jaxformer import positions
from jaxformer.porting.formats.arrays import to_stored_tensors
from tests.support.hugging_face_cases import BATCH, LENGTH, SIZES, VOCAB, Case


def build(kind: str, settings: dict[str, Any], **arguments: Any) -> Any:
    """A model of transformers in float32 and evaluation mode, from what a config.json holds."""
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    # Through JSON, as from a file.
    config = cls.config_class.from_dict(
        json.loads(json.dumps(settings)), attn_implementation="eager"
    )
    return cls(config, **arguments).eval()


def build_case(case: Case) -> Any:
    """The model of a case with its first weights, in float64 and evaluation mode."""
    settings = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, **case.settings}
    return exact(build(case.kind, settings, **case.arguments).double())


def randomize(model: Any, std: float = 0.3, embeddings: float = 1.0) -> Any:
    """Every parameter moved away from where it began, those of norms too.

    Args:
        model: of transformers, float64.
        std: how far.
        embeddings: a factor on what has a row or an entry for every token.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).double() * std)
            if parameter.shape[0] == VOCAB:
                parameter.mul_(embeddings)
        if hasattr(model, "cls"):
            # transformers ties the two only together with the matrix, and then uses one of them.
            model.cls.predictions.bias.copy_(model.cls.predictions.decoder.bias)
    return model


def exact(model: Any) -> Any:
    """Gemma's factor of the embeddings in float64, which it keeps as a float32 buffer."""
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
    return model


@contextlib.contextmanager
def in_float32():
    """What is called float32 is float64."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


@contextlib.contextmanager
def same_tables(model: Any, target: Any):
    """transformers computes with jaxformer's rotary tables and ALiBi slopes."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                stack.enter_context(mock.patch.object(module, "forward", target_tables(target)))
        slopes = mock.patch.object(modeling_bloom, "_get_alibi_slopes", _target_slopes)
        stack.enter_context(slopes)
        yield


def target_tables(target: Any) -> Any:
    """The function of a rotary embedding of transformers, with jaxformer's tables."""
    position = target.blocks[0].attention.position
    cos_sin = positions.rotary_tables(
        position.max_length, position.width, position.base, position.scaling
    )
    tables = [torch.tensor(np.concatenate((t, t), axis=1)).double() for t in cos_sin]
    return lambda x, position_ids: tuple(table[position_ids] for table in tables)


def source_tables(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """The cosines and sines that transformers computes, in the form of ``rotary_tables``."""
    module = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    x = torch.zeros((), dtype=torch.float32)
    cos, sin = module(x, torch.arange(SIZES["max_position_embeddings"])[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].numpy(), sin[0, :, :half].numpy()


def _target_slopes(num_heads: int, device: Any) -> torch.Tensor:
    return torch.tensor(positions.alibi_slopes(num_heads)).double()


def _wide_slopes(num_heads: int) -> np.ndarray:
    return _SLOPES(num_heads).astype(np.float64)


_SLOPES = positions.alibi_slopes


@contextlib.contextmanager
def wide_slopes():
    """ALiBi without rounding: jaxformer rounds slope · distance, transformers slope · position."""
    with mock.patch.object(positions, "alibi_slopes", _wide_slopes):
        yield


def tokens(seed: int = 0, shape: tuple[int, int] = (BATCH, LENGTH)) -> np.ndarray:
    """Ids that are none of the special tokens, on which PyTorch's embeddings get no gradient."""
    return np.random.default_rng(seed).integers(3, VOCAB, shape)


def run_source(model: Any, target: Any, ids: np.ndarray, **more: np.ndarray) -> list[torch.Tensor]:
    """The logits or hidden states, and what is pooled of them."""
    arguments = {name: torch.as_tensor(value) for name, value in more.items()}
    with in_float32(), same_tables(model, target):
        result = model(torch.as_tensor(ids), **arguments)
    if "logits" in result:
        return [result.logits]
    pooled = result.get("pooler_output")
    return [result.last_hidden_state, *([] if pooled is None else [pooled])]


def run_target(target: Any, ids: np.ndarray, *arguments: Any, **more: Any) -> list[Any]:
    """The same of the jaxformer model."""
    with wide_slopes():
        result = target(jnp.asarray(ids), *arguments, **more)
    return [result, *([target.pooled(result)] if target.config.head.pooler else [])]


def assert_close(found: Any, expected: Any, tolerance: float, of: str = "") -> None:
    """Every difference is within ``tolerance`` of the largest entry that is expected."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    scale = np.abs(expected).max()
    assert scale > 0, of
    assert np.abs(found - expected).max() <= tolerance * scale, (
        of,
        np.abs(found - expected).max() / scale,
    )


def bits_of(arrays: Any) -> dict[str, tuple[bytes, np.dtype, tuple[int, ...]]]:
    """Bytes, dtype and shape of each array, torch's or numpy's."""
    read = {name: tensor.read() for name, tensor in to_stored_tensors(arrays).items()}
    return {name: (a.tobytes(), a.dtype, a.shape) for name, a in read.items()}
