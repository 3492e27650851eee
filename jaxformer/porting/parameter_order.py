"""The order of a PyTorch model's parameters, by which its optimizers count.

PyTorch files have it. Files of safetensors are sorted by name, so it is taken from the class: that
of transformers, or jaxformer's own, which those of ``LIKE_JAXFORMER`` share.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flax import nnx

from jaxformer.parameters import abstract_module
from jaxformer.porting.dialects.common.transformers_types import TRANSFORMERS_TYPES
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG
from jaxformer.porting.mapping.plans import Plan

LIKE_JAXFORMER = ("jaxformer", "torch_ref")
ORDERS = {name: known.order for name, known in TRANSFORMERS_TYPES.items()}
# nanoGPT has the names of GPT-2.
ORDERS["nanogpt"] = ORDERS["gpt2"]


def parameter_order(
    exported: Plan, imported: Sequence[str], recorded: Mapping[str, Any]
) -> list[str] | None:
    """Returns the names in the order of ``named_parameters()``, or None if it is not known.

    Args:
        exported: the export of the model.
        imported: the order in which its arrays came; empty if they came with other names, or from a
            file that sorts them.
        recorded: the dialect from which a run's arrays were ported, and their order there.
    """
    if imported:
        return list(imported)
    dialect = exported.origin.dialect.name
    if dialect in LIKE_JAXFORMER:
        links = {name: link for link in exported.links for name in link.target}
        ordered = (links[target].source for target in declared_order(exported.module))
        return list(dict.fromkeys(name for names in ordered for name in names))
    of_parameters = (link for link in exported.links if not link.rule.is_buffer)
    linked = {name for link in of_parameters for name in link.source}
    names = [n for n in exported.tensors if n in linked or n in exported.module_mapping.aliases]
    # Some classes do not have the arrays that lie in files.
    has_others = exported.origin.is_published and exported.module_mapping.published is not None
    if dialect in ORDERS and not has_others:
        return sort_parameters(names, ORDERS[dialect])
    known = recorded.get("order") if recorded.get("dialect") == dialect else None
    return list(known) if known else None


def sort_parameters(names: Iterable[str], order: Sequence[str]) -> list[str] | None:
    """Returns names in the order of modules: of each its own parameters, then its children.

    >>> sort_parameters(["h.10.b.w", "h.9.b.w", "h.9.a.w", "e"], ["e", "h", "a", "b", "w"])
    ['e', 'h.9.a.w', 'h.9.b.w', 'h.10.b.w']

    Args:
        names: with their dots.
        order: of modules and parameters; ``parent.name`` where one parent has another order.

    Returns:
        The names, or None where the order does not have a part of one.
    """
    ranks = {part: number for number, part in enumerate(order)}

    def place(name: str) -> list[tuple[bool, int]]:
        *modules, parameter = name.split(".")
        places, parent = [], ""
        for part in modules:
            places.append((True, int(part) if part.isdigit() else rank(parent, part)))
            parent = parent if part.isdigit() else part
        return [*places, (False, rank(parent, parameter))]

    def rank(parent: str, name: str) -> int:
        return ranks[f"{parent}.{name}" if f"{parent}.{name}" in ranks else name]

    try:
        return sorted(names, key=place)
    except KeyError:
        return None


def declared_order(module: Any) -> list[str]:
    """Returns the parameters' names in the order in which the model's constructor makes them."""
    config: Any = getattr(module, "config", None)
    build = MODEL_OF_CONFIG.get(type(config))
    if build is None:
        return _parameters(module)
    names: list[str] = []

    def note(rngs: Any) -> Any:
        # A module that went through eval_shape has its attributes in alphabetical order.
        made = build(module.config, rngs=rngs)
        names.extend(_parameters(made))
        return made

    abstract_module(note)
    return names


def _parameters(module: Any, path: str = "") -> list[str]:
    names = []
    children = enumerate(module) if isinstance(module, nnx.List) else vars(module).items()
    for name, child in children:
        if isinstance(child, nnx.Param):
            names.append(f"{path}{name}")
        elif isinstance(child, nnx.Module | nnx.List) and not str(name).startswith("_"):
            names += _parameters(child, f"{path}{name}.")
    return names
