"""Loads Hugging Face folders with ``transformers``, without its warnings and progress bars."""

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.config import TransformerLMConfig
from jaxformer.errors import CheckpointError, UsageError
from jaxformer.porting.dialects.multimodal import MULTIMODAL
from jaxformer.porting.formats.arrays import to_stored_tensors
from jaxformer.porting.formats.tensors import StoredTensor

if TYPE_CHECKING:
    from jaxformer.parity.sources.checkpoints import Source


def from_transformers(source: "Source") -> Any:
    """Loads a folder with the class of ``transformers`` that its config names.

    Raises:
        UsageError: it is a model that sees.
        CheckpointError: transformers cannot load it, or loads other numbers than the file holds.
    """
    import transformers

    settings = source.checkpoint.config
    whole = settings.get("model_type") if isinstance(settings, Mapping) else None
    if whole in MULTIMODAL:
        raise UsageError(
            f"{source.path} is a {whole}, whose language model transformers loads from a folder of "
            "its own: make one with jaxformer port --to hf"
        )
    cls = getattr(transformers, source.plan.origin.kind)
    more = {"add_pooling_layer": False} if _lacks_pooler(source, cls) else {}
    with _quiet():
        try:
            module, found = cls.from_pretrained(
                source.path,
                local_files_only=True,
                dtype=widest_dtype(source),
                attn_implementation=_attention_path(source),
                output_loading_info=True,
                **more,
            )
        # transformers raises errors of many kinds.
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise CheckpointError(
                f"{source.path}: transformers cannot load it: {reason}"
            ) from error
    missing = sorted({str(name) for name in found["missing_keys"]})
    if missing or found["mismatched_keys"]:
        raise CheckpointError(
            f"{source.path}: transformers does not find all weights of {cls.__name__}: "
            + "; ".join([*missing, *map(str, found["mismatched_keys"])])
        )
    prepare_module(module)
    _check_loaded(module, source)
    return module


def empty_transformer(source: "Source") -> Any:
    """Makes the module that ``from_transformers`` would load; the caller keeps it from weights.

    Raises:
        CheckpointError: transformers cannot make it.
    """
    import transformers

    cls = getattr(transformers, source.plan.origin.kind)
    more = {"add_pooling_layer": False} if _lacks_pooler(source, cls) else {}
    with _quiet():
        try:
            config = cls.config_class.from_pretrained(source.path, local_files_only=True)
            module = cls._from_config(
                config,
                dtype=widest_dtype(source),
                attn_implementation=_attention_path(source),
                **more,
            )
        # transformers raises errors of many kinds.
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise CheckpointError(
                f"{source.path}: transformers cannot make it: {reason}"
            ) from error
    prepare_module(module)
    return module


def prepare_module(module: Any) -> None:
    """Makes a module of transformers run by the code that can be compared; numbers do not change.

    The faster products of experts take no float64, and their code has no modules to look into.
    """
    for part in module.modules():
        # The halves of a T5 have settings of their own.
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    if hasattr(module.config, "_experts_implementation"):
        module.config._experts_implementation = "eager"
    if type(module).__name__.endswith("ForQuestionAnswering"):
        module.register_forward_hook(_join_answers)
    if type(module).__name__.endswith("ForMultipleChoice"):
        module.register_forward_pre_hook(_as_one_choice)


def _as_one_choice(module: Any, inputs: Any) -> Any:
    """Returns the ids (B, T) that a class for choices is called with as one choice, (B, 1, T)."""
    return tuple(ids[:, None] for ids in inputs)


def _join_answers(module: Any, inputs: Any, outputs: Any) -> Any:
    """Returns the logits of an answer's first and last token as one array, as the head made it."""
    import torch

    return torch.stack((outputs.start_logits, outputs.end_logits), dim=-1)


def _attention_path(source: "Source") -> str:
    """Returns the implementation of attention that transformers is to run.

    Those besides eager have no soft cap and return no attention weights. But Falcon's adds ALiBi
    twice: it is run where the config names it.
    """
    is_falcon = source.plan.origin.dialect.name == "falcon"
    if not is_falcon or source.plan.module.config.position.positions != "alibi":
        return "eager"
    settings = source.checkpoint.config
    names = ("attn_implementation", "_attn_implementation")
    named = [settings.get(name) for name in names] if isinstance(settings, Mapping) else []
    return "eager" if "eager" in named else "sdpa"


def widest_dtype(source: "Source") -> Any:
    """Returns the torch dtype of a whole module, which holds the values of all arrays exactly."""
    import torch

    dtypes = [getattr(torch, tensor.dtype.name) for tensor in source.plan.tensors.values()]
    return functools.reduce(torch.promote_types, dtypes)


def _check_loaded(module: Any, source: "Source") -> None:
    """Checks that the loaded weights have the values of those in the file.

    Raises:
        CheckpointError: they differ.
    """
    loaded = to_stored_tensors(module.state_dict())
    inside = source.checkpoint.raw.tensors
    wrong = [
        name
        for name in loaded.keys() & inside.keys()
        if not np.array_equal(_wide(loaded[name]), _wide(inside[name]), equal_nan=True)
    ]
    if wrong:
        raise CheckpointError(
            f"{source.path}: transformers loads other numbers than the file holds: "
            + ", ".join(sorted(wrong))
        )


def _lacks_pooler(source: "Source", cls: type) -> bool:
    """Returns whether a model has no pooler, and transformers would add one."""
    adds = "add_pooling_layer" in inspect.signature(cls).parameters
    return adds and isinstance(source.config, TransformerLMConfig) and not source.config.head.pooler


def _wide(tensor: StoredTensor) -> np.ndarray:
    return tensor.read().astype(np.float64)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers: what it would warn of is an error here."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
