"""Folders of Hugging Face as models of ``transformers``, loaded without a word of its own."""

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.errors import CheckpointError
from jaxformer.porting.formats.arrays import to_stored_tensors
from jaxformer.porting.formats.tensors import StoredTensor

if TYPE_CHECKING:
    from jaxformer.parity.sources.checkpoints import Source


def from_transformers(source: "Source") -> Any:
    """The model of a folder, by the class of ``transformers`` that its config names.

    Raises:
        CheckpointError: transformers cannot load it, or loads something else than it holds.
    """
    import torch
    import transformers

    cls = getattr(transformers, source.plan.origin.kind)
    more = {"add_pooling_layer": False} if _has_no_pooler(source) else {}
    # One module has one dtype: the widest, into which the others go exactly.
    dtypes = [getattr(torch, tensor.dtype.name) for tensor in source.plan.tensors.values()]
    with _quiet():
        try:
            module, found = cls.from_pretrained(
                source.path,
                local_files_only=True,
                dtype=functools.reduce(torch.promote_types, dtypes),
                # The others have no soft cap, and give no attention weights.
                attn_implementation="eager",
                output_loading_info=True,
                **more,
            )
        # It raises whatever its parts raise.
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise CheckpointError(
                f"{source.path}: transformers cannot load it: {reason}"
            ) from error
    lacking = sorted({str(name) for name in found["missing_keys"]})
    if lacking or found["mismatched_keys"]:
        raise CheckpointError(
            f"{source.path}: transformers does not find all weights of {cls.__name__}: "
            + "; ".join([*lacking, *map(str, found["mismatched_keys"])])
        )
    module.config.use_cache = False
    _check_loaded(module, source)
    return module


def _check_loaded(module: Any, source: "Source") -> None:
    """What was loaded is what is in the file, bit for bit but for its dtype.

    Raises:
        CheckpointError: it is not.
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


def _has_no_pooler(source: "Source") -> bool:
    """Whether it is a BERT without a pooler, which transformers would add."""
    return source.plan.origin.kind == "BertModel" and not getattr(source.config, "pooler", True)


def _wide(tensor: StoredTensor) -> np.ndarray:
    return tensor.read().astype(np.float64)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from talking: what it would warn of is refused here."""
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
