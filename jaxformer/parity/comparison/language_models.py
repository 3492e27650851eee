"""The models and token ids of a training or generation comparison, checked before they run."""

import dataclasses
from typing import Any, Literal

import numpy as np
from flax import nnx

from jaxformer.config import (
    EncoderDecoderConfig,
    TransformerClassifierConfig,
    TransformerLMConfig,
)
from jaxformer.config_dual_encoder import DualEncoderConfig
from jaxformer.config_speech import SpeechClassifierConfig
from jaxformer.config_vision import VisionTransformerConfig
from jaxformer.errors import UsageError, mismatches
from jaxformer.parity.recording.torch_values import as_numpy, require_torch
from jaxformer.parity.words import listed
from jaxformer.porting.mapping.abstract_modules import parameter_shapes

# The target that PyTorch's cross-entropy leaves out, unless it is given another.
IGNORED_TARGET = -100


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a step of training reads.

    Attributes:
        inputs: ids (B, T).
        targets: ids (B, T); 0 where they do not count.
        counted: which targets count (B, T).
    """

    inputs: np.ndarray
    targets: np.ndarray
    counted: np.ndarray


def check_models(torch_module: Any, jax_module: Any, then: str) -> None:
    """Requires what can be a reference and, if there is one, a candidate of jaxformer.

    Args:
        torch_module: the reference.
        jax_module: the candidate, or None.
        then: the name of the argument that comes after these two.

    Raises:
        UsageError: one of them is something else.
    """
    if not isinstance(torch_module, require_torch().nn.Module):
        raise UsageError(
            f"the reference must be a torch.nn.Module: got {type(torch_module).__name__}"
        )
    if jax_module is not None and not _is_own(jax_module):
        raise UsageError(
            f"the candidate must be one of jaxformer's models: got {type(jax_module).__name__} "
            f"(to give {then} without it, write {then}=…)"
        )


def unsuitable(mode: Literal["train", "generate"], config: Any) -> str:
    """Returns what a model is that cannot be compared in a mode; "" if it can.

    Args:
        mode: what both models would do.
        config: of the model.
    """
    if isinstance(config, EncoderDecoderConfig):
        return "an encoder and a decoder"
    if isinstance(config, VisionTransformerConfig):
        return "a model that sees"
    if isinstance(config, DualEncoderConfig):
        return "a model of texts and images"
    if isinstance(config, SpeechClassifierConfig):
        return "a model that hears"
    if isinstance(config, TransformerClassifierConfig):
        return "a model that classifies"
    if not isinstance(config, TransformerLMConfig) or config.head.head == "none":
        return "a model without a head"
    if config.vocab_size is None:
        return "a model without a vocabulary"
    if mode == "generate" and not config.causal:
        return "a model that sees later tokens"
    if mode == "generate" and config.context_length < 2:
        return "a model with a context of one token"
    return ""


def check_suitable(mode: Literal["train", "generate"], config: Any) -> None:
    """Requires a language model with a head.

    Raises:
        UsageError: it is another model.
    """
    if found := unsuitable(mode, config):
        name = {"train": "compare_training", "generate": "compare_generation"}[mode]
        raise UsageError(f"{name} needs a language model with a head: got {found}; use compare")


def check_vocabulary(expected: Any, config: Any) -> None:
    """Requires a candidate that scores the reference's tokens.

    Args:
        expected: the config of the reference's port.
        config: that of the candidate.

    Raises:
        UsageError: it knows more or fewer tokens.
    """
    if config.vocab_size != expected.vocab_size:
        raise UsageError(
            f"the candidate has {config.vocab_size} tokens, and the reference "
            f"{expected.vocab_size}: give models of one vocabulary"
        )


def check_parameters(expected: Any, candidate: Any) -> None:
    """Requires a candidate with the parameters of the reference, which are trained beside them.

    Args:
        expected: the reference's port; it may be without numbers.
        candidate: one of jaxformer's models.

    Raises:
        UsageError: a parameter is missing or has another shape.
    """
    wanted, found = parameter_shapes(expected), parameter_shapes(candidate)
    problems = mismatches(wanted, {n: s for n, s in found.items() if n in wanted}, "has shape")
    if problems:
        raise UsageError(
            f"the candidate is not of the architecture of the reference: {listed(problems)}"
        )


def padding_ids(module: Any) -> set[int]:
    """Returns the ids whose embeddings get no gradient in PyTorch."""
    torch = require_torch()
    return {
        m.padding_idx
        for m in module.modules()
        if isinstance(m, torch.nn.Embedding) and m.padding_idx is not None
    }


def check_prompt(prompt: Any, config: Any) -> np.ndarray:
    """Returns a prompt as ids (1, T).

    Raises:
        UsageError: it is something else, is empty, or has an id that the model does not know.
    """
    ids = _ids(prompt, "the prompt", "(1, T)", config)
    if ids.shape[0] != 1:
        raise UsageError(f"the prompt must be one text, (1, T): got {ids.shape[0]} texts")
    return ids


def check_batch(pair: Any, number: int, config: Any) -> Batch:
    """Returns what was drawn for a step of training.

    Args:
        pair: inputs and targets, as the user's function returned them.
        number: of the step.
        config: of the candidate.

    Raises:
        UsageError: it is no such pair, is empty, or is more or other than the model can read.
    """
    name = f"batch {number}"
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UsageError(f"{name} must be a pair, inputs and targets: got {_describe(pair)}")
    inputs = _ids(pair[0], f"the inputs of {name}", "(B, T)", config)
    given = _integers(pair[1], f"the targets of {name}", "(B, T)")
    counted = given != IGNORED_TARGET
    if given.shape != inputs.shape:
        raise UsageError(
            f"inputs and targets of {name} must be of one shape: got {inputs.shape} and "
            f"{given.shape}"
        )
    if inputs.shape[1] > config.context_length:
        raise UsageError(
            f"{name} has {inputs.shape[1]} tokens a text, and the model reads "
            f"{config.context_length}: give shorter ones"
        )
    if not counted.any():
        raise UsageError(
            f"every target of {name} is {IGNORED_TARGET}, which does not count: give one that does"
        )
    targets = np.where(counted, given, 0)
    _check_range(targets, f"the targets of {name}", config)
    return Batch(inputs, targets, counted)


def _ids(value: Any, name: str, shape: str, config: Any) -> np.ndarray:
    ids = _integers(value, name, shape)
    _check_range(ids, name, config)
    return ids


def _integers(value: Any, name: str, shape: str) -> np.ndarray:
    try:
        array = np.asarray(as_numpy(value))
    except ValueError:
        array = None
    if array is None or array.ndim != 2 or not array.size:
        raise UsageError(f"{name} must be token ids {shape}: got {_describe(value)}")
    if array.dtype.kind not in "iu":
        raise UsageError(f"{name} must be token ids, which are integers: got {array.dtype}")
    return array.astype(np.int64)


def _check_range(ids: np.ndarray, name: str, config: Any) -> None:
    wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
    if wrong.size:
        raise UsageError(
            f"{name} must be ids from 0 to {config.vocab_size - 1}, those of the model's tokens: "
            f"got {wrong[0]}"
        )


def _describe(value: Any) -> str:
    """Returns what a value is, in a few words."""
    try:
        shape = np.shape(as_numpy(value))
    except ValueError:
        return f"a {type(value).__name__} of unequal parts"
    return f"shape {shape}" if shape else type(value).__name__


def _is_own(module: Any) -> bool:
    return isinstance(module, nnx.Module) and hasattr(module, "config")
