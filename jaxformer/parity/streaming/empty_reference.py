"""The reference's modules without their weights, and where these are."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxformer.parity.recording.torch_values import require_torch
from jaxformer.parity.recording.twins import join_twins
from jaxformer.parity.sources.checkpoints import (
    Source,
    as_tensor,
    make_twin,
    uses_transformers,
)
from jaxformer.parity.sources.transformers_folders import empty_transformer
from jaxformer.parity.streaming.layout import CannotStreamError
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.transfer import export_tensors
from jaxformer.porting.mapping.wrapped_names import unwrap


class EmptyReference:
    """The reference's modules, with shapes in place of weights, and where its arrays are.

    Args:
        source: the checkpoint.

    Attributes:
        module: the model in PyTorch, in the dtype of its weights.
        tensors: its arrays, by PyTorch's names.
        note: which code runs, in words.

    Raises:
        CannotStreamError: an array of the model is not found in the checkpoint.
    """

    def __init__(self, source: Source):
        torch = require_torch()
        with _parameters_without_numbers():
            is_transformer, library = uses_transformers(source)
            module = empty_transformer(source) if is_transformer else make_twin(source.config)
        self.module = module.eval()
        self.note = f"{library[0]} {type(module).__name__} in PyTorch {torch.__version__}"
        self.note += library[1]
        linked = export_tensors(source.plan.links, source.plan.tensors)
        found = unwrap(source.checkpoint.raw.tensors) | linked
        aliases = source.plan.module_mapping.aliases
        self.tensors: dict[str, StoredTensor] = {}
        names = defaultdict(list)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names[id(parameter)].append((name, tuple(parameter.shape)))
        for places in names.values():
            known = [n for name, _ in places for n in (name, aliases.get(name)) if n in found]
            if not known or found[known[0]].shape != places[0][1]:
                raise CannotStreamError(f"{source.path} has no array like {places[0][0]}")
            self.tensors |= {name: found[known[0]] for name, _ in places}
            if known[0] not in linked:
                # A table of positions, by whose numbers it is known; jaxformer computes it.
                table = as_tensor(np.ascontiguousarray(found[known[0]].read()))
                for name, _ in places:
                    owner, _, leaf = name.rpartition(".")
                    frozen = torch.nn.Parameter(table, requires_grad=False)
                    module.get_submodule(owner)._parameters[leaf] = frozen
        self.module = join_twins(self.module, aliases)


@contextlib.contextmanager
def _parameters_without_numbers() -> Iterator[None]:
    """Makes every new parameter a shape inside the ``with`` block; buffers are computed."""
    torch = require_torch()
    original = torch.nn.Module.register_parameter

    def register(self: Any, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        original(self, name, parameter)

    torch.nn.Module.register_parameter = register
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original
