"""Opens two checkpoints and loads them: A, the reference, in PyTorch; B, the candidate, in JAX."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.config_dual_encoder import DualEncoderConfig
from jaxformer.config_speech import SpeechClassifierConfig
from jaxformer.config_vision import VisionTransformerConfig
from jaxformer.errors import CheckpointError, JaxformerError, Setting, UsageError
from jaxformer.parity.recording.torch_values import require_torch
from jaxformer.parity.sources.transformers_folders import from_transformers
from jaxformer.porting.api import build
from jaxformer.porting.checkpoint import Checkpoint, open_checkpoint
from jaxformer.porting.mapping.abstract_modules import (
    MODEL_OF_CONFIG,
    parameter_shapes,
)
from jaxformer.porting.mapping.naming import export_arrays
from jaxformer.porting.mapping.plans import Plan

ModelConfig = (
    TransformerLMConfig
    | EncoderDecoderConfig
    | VisionTransformerConfig
    | DualEncoderConfig
    | SpeechClassifierConfig
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that was found to make a whole model; none of its arrays is read yet.

    Attributes:
        path: the file or folder.
        checkpoint: what is in it.
        plan: how it becomes a JAX model.
        note: what was changed for that, in words; "" if nothing was.
    """

    path: Path
    checkpoint: Checkpoint
    plan: Plan
    note: str = ""

    @property
    def config(self) -> ModelConfig:
        """The settings of the model."""
        config: ModelConfig = self.plan.module.config
        return config


@dataclasses.dataclass(frozen=True)
class LoadedReference:
    """A checkpoint as a model in PyTorch.

    Attributes:
        module: in evaluation mode.
        note: which code runs, in words.
    """

    module: Any
    note: str


def call_reference(module: Any, given: Sequence[Any]) -> Any:
    """Calls a reference, given its inputs: of a text, or of two sequences."""
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False) and len(given) == 2:
        source, target = given
        name = getattr(module, "main_input_name", "input_ids")
        return module(**{name: source}, decoder_input_ids=target)
    return module(*given)


def open_source(
    path: Path,
    letter: str,
    *,
    dialect: str | None = None,
    config: Path | None = None,
    ignore: Sequence[str] = (),
    force: bool = False,
) -> Source:
    """Opens one of the two checkpoints of ``jaxformer verify``.

    Args:
        path: see ``open_checkpoint``.
        letter: "a" or "b"; an error names the setting ``dialect`` of this side ``dialect_a``.
        dialect: see ``open_checkpoint``.
        config: see ``open_checkpoint``.
        ignore: see ``open_checkpoint``.
        force: see ``open_checkpoint``.

    Raises:
        UsageError: the checkpoint holds no whole model.
        JaxformerError: whatever ``open_checkpoint`` and ``Checkpoint.plan`` raise.
    """
    try:
        checkpoint = open_checkpoint(
            path, dialect=dialect, config=config, ignore=ignore, force=force
        )
        plan = checkpoint.plan()
    except JaxformerError as error:
        # Each keyword of the library is two keywords here, one a side.
        parts = [
            part._replace(name=f"{part.name}_{letter}") if _has_sides(part) else part
            for part in error.args
        ]
        # A message names it first if at all; elsewhere its name may be any word of the message.
        is_named = str(error).startswith(tuple(f"{path}{after}" for after in (":", "/", " ")))
        prefix = [] if is_named else [f"{path}: "]
        raise type(error)(*prefix, *parts) from error
    if type(getattr(plan.module, "config", None)) not in MODEL_OF_CONFIG:
        raise UsageError(
            f"{path} holds a {plan.origin.kind}, and only whole models are verified; "
            "jaxformer.parity.compare takes any module"
        )
    return Source(path, checkpoint, plan)


def _has_sides(part: Any) -> bool:
    """Whether a part of a message is a setting that A and B have apart."""
    return isinstance(part, Setting) and part.name in ("dialect", "config")


def check_same_architecture(reference: Source, candidate: Source) -> None:
    """Checks that the arrays of two checkpoints have the same names and shapes.

    Raises:
        CheckpointError: they differ; the message lists all arrays that are missing, unexpected or
            of another shape, by their names in jaxformer.
    """
    wanted, found = (parameter_shapes(source.plan.module) for source in (reference, candidate))
    problems = [f"missing {name} {wanted[name]}" for name in wanted if name not in found]
    problems += [f"unexpected {name} {found[name]}" for name in found if name not in wanted]
    problems += [
        f"{name} has shape {found[name]}, not {wanted[name]}"
        for name in wanted
        if name in found and found[name] != wanted[name]
    ]
    if problems:
        raise CheckpointError(
            f"{candidate.path} is not of the architecture of {reference.path}: "
            f"{'; '.join(problems)}"
        )


def load_candidate(source: Source) -> tuple[Any, str]:
    """Loads a checkpoint as a JAX model; also returns which code runs, in words.

    Position tables that are stored in the checkpoint, and were found to be right, are computed
    again, because the other side does not have them.

    Raises:
        CheckpointError: an array is damaged.
    """
    origin = dataclasses.replace(source.plan.origin, buffers={})
    module = build(dataclasses.replace(source.plan, origin=origin))
    return module, describe_candidate(source)


def describe_candidate(source: Source) -> str:
    """Returns in words which code runs a checkpoint in JAX."""
    import jax

    kind = type(source.plan.module).__name__
    return f"jaxformer.{kind} in JAX {jax.__version__}{source.note}"


def load_reference(source: Source) -> LoadedReference:
    """Loads a checkpoint as a model in PyTorch, with its weights in their own dtype.

    A Hugging Face folder is run by ``transformers`` if that is installed, from local files and with
    its own classes only: code that comes with a checkpoint never runs. All others are run by
    ``torch_ref``, the PyTorch twin of jaxformer's models.

    Raises:
        UsageError: torch is not installed.
        CheckpointError: an array is damaged, or transformers cannot load the folder.
    """
    torch = require_torch()
    is_transformer, (library, remark) = uses_transformers(source)
    if is_transformer:
        module = from_transformers(source)
        name = type(module).__name__
    else:
        module = make_twin(source.config)
        arrays = {name: tensor.read() for name, tensor in source.plan.tensors.items()}
        state = {name: as_tensor(array) for name, array in export_arrays(arrays).items()}
        module.load_state_dict(state, strict=True, assign=True)
        name = type(module).__name__
    note = f"{library} {name} in PyTorch {torch.__version__}{remark}"
    return LoadedReference(module.eval(), note)


def uses_transformers(source: Source) -> tuple[bool, tuple[str, str]]:
    """Returns whether ``transformers`` runs a checkpoint; and which library does, and why it."""
    if source.checkpoint.raw.kind != "huggingface":
        return False, ("torch_ref", "")
    if importlib.util.find_spec("transformers") is None:
        return False, ("torch_ref", ", as transformers is not installed")
    import transformers

    library = f"transformers {transformers.__version__}"
    if not hasattr(transformers, source.plan.origin.kind):
        return False, ("torch_ref", f", as {library} has no {source.plan.origin.kind}")
    return True, (library, "")


def make_twin(config: ModelConfig) -> Any:
    """Makes the PyTorch twin of a jaxformer model, with random weights."""
    require_torch()
    config_of_twin = _twin_of(type(config))(**config.settings())
    return _twin_of(MODEL_OF_CONFIG[type(config)])(config_of_twin)


def _twin_of(cls: type) -> Any:
    """Returns the class of torch_ref that has the name and the file of one of jaxformer."""
    file = cls.__module__.rpartition(".")[2]
    return getattr(importlib.import_module(f"torch_ref.{file}"), cls.__name__)


def as_tensor(array: np.ndarray) -> Any:
    """Returns a numpy array as a tensor of the same dtype, which may be bfloat16."""
    torch = require_torch()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dtype_names(source: Source) -> str:
    """Returns the dtypes of the weights, separated by commas."""
    return ", ".join(sorted({tensor.dtype.name for tensor in source.plan.tensors.values()}))
