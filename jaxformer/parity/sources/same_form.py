"""Brings a checkpoint into the form of another, where one model can be stored in two ways."""

import dataclasses
import functools
import re
from collections.abc import Callable

import numpy as np

from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.parity.judging.weights import weight_difference
from jaxformer.parity.sources.checkpoints import Source
from jaxformer.porting.formats.tensors import StoredTensor, as_bytes
from jaxformer.porting.mapping.abstract_modules import abstract_model
from jaxformer.porting.mapping.packings import RotaryPermutation

# The arrays whose order of features depends on the rotary layout.
ROTATED = re.compile(r"attention\.(q|k)_(proj|norm)\.")
HEAD = "lm_head.kernel"


def with_head_of(reference: Source, candidate: Source) -> Source:
    """Returns B with a tied head, or one of its own, as A has it.

    A head that is equal to the token embedding computes what a tied one does. Where B's is another,
    B is returned unchanged.
    """
    config, wanted = candidate.config, reference.config
    if (
        not isinstance(config, TransformerLMConfig | EncoderDecoderConfig)
        or not isinstance(wanted, type(config))
        or config.head.tie_embeddings == wanted.head.tie_embeddings
    ):
        return candidate
    is_decoder = isinstance(config, TransformerLMConfig)
    table_name = f"{'token' if is_decoder else 'target'}_embedding.embedding"
    tensors = dict(candidate.plan.tensors)
    table = tensors.get(table_name)
    if table is None:
        return candidate
    if wanted.head.tie_embeddings:
        head = tensors.pop(HEAD, None)
        if head is None or (head.shape, head.dtype) != (table.shape[::-1], table.dtype):
            return candidate
        if as_bytes(head.read()) != as_bytes(_read_turned(table)):
            return candidate
        note = "its head tied to the embedding, which is equal"
    else:
        read = functools.partial(_read_turned, table)
        tensors[HEAD] = StoredTensor(table.shape[::-1], table.dtype, read)
        note = "its head no longer tied to the embedding"
    module = abstract_model(config.replace(tie_embeddings=wanted.head.tie_embeddings))
    plan = dataclasses.replace(candidate.plan, module=module, tensors=tensors)
    return dataclasses.replace(candidate, plan=plan, note=f"{candidate.note}, {note}")


def _read_turned(table: StoredTensor) -> np.ndarray:
    return np.ascontiguousarray(table.read().T)


def in_rotary_layout_of(reference: Source, candidate: Source) -> Source:
    """Returns B with its queries and keys in A's rotary layout, if its weights fit its own layout.

    Rotary positions either turn neighbouring features or the two halves of a head. With reordered
    weights both compute the same, so one model can be stored in two ways. If the reordered weights
    of B are closer to A's, they are reordered. If B has A's weights as they are but another layout,
    that is a bug: B is returned unchanged, for the comparison to find it.
    """
    config = candidate.config
    if (
        not isinstance(config, TransformerLMConfig)
        or config.position.positions != "rotary"
        or not isinstance(reference.config, TransformerLMConfig)
        or config.position.rotary.rotary_interleaved
        == reference.config.position.rotary.rotary_interleaved
    ):
        return candidate
    attention = candidate.plan.module.blocks[0].attention
    packing = RotaryPermutation(attention.head_dim, attention.position.width)

    def reorder(array: np.ndarray) -> np.ndarray:
        outputs_first = [np.moveaxis(array, -1, 0)]
        shapes = [outputs_first[0].shape]
        turned = (
            packing.pack(outputs_first)
            if config.position.rotary.rotary_interleaved
            else packing.unpack(outputs_first, shapes)
        )
        return np.ascontiguousarray(np.moveaxis(turned[0], 0, -1))

    names = [name for name in candidate.plan.tensors if ROTATED.search(name)]
    as_it_is = reordered = 0
    tensors = dict(candidate.plan.tensors)
    for name in names:
        array, expected = tensors[name].read(), reference.plan.tensors[name].read()
        as_it_is += not weight_difference(array, expected).is_bug
        reordered += not weight_difference(reorder(array), expected).is_bug
        read = functools.partial(_read_reordered, tensors[name], reorder)
        tensors[name] = dataclasses.replace(tensors[name], read=read, storage=None)
    if reordered <= as_it_is:
        return candidate
    same = config.replace(rotary_interleaved=not config.position.rotary.rotary_interleaved)
    module = abstract_model(same)
    plan = dataclasses.replace(candidate.plan, module=module, tensors=tensors)
    note = f"{candidate.note}, queries and keys reordered to A's rotary layout"
    return dataclasses.replace(candidate, plan=plan, note=note)


def _read_reordered(
    tensor: StoredTensor, reorder: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    return reorder(tensor.read())
