"""Plans of imports and exports, made from names, shapes and settings before any weight is read.

A plan pairs every source array with target arrays, each exactly once, or is rejected with all that
is wrong. Its tensors are read one by one when they are needed.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.errors import CheckpointError, JaxformerError, UsageError
from jaxformer.porting.formats.tensors import StoredTensor, digest
from jaxformer.porting.mapping.abstract_modules import (
    architecture_of,
    build_abstract,
    parameter_shapes,
)
from jaxformer.porting.mapping.adapter import Buffer, ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.matching import match_arrays
from jaxformer.porting.mapping.rules import Link, link
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.transfer import Tensors, export_tensors, import_tensors


class CannotHoldError(UsageError):
    """A dialect has no class that computes what a module does.

    Args:
        text: the message.
        distance: between the module and the nearest class: whether this cannot be built, how many
            parameters have no place in it, and how many differences there are.
    """

    def __init__(self, text: str, distance: tuple[bool, int, int]):
        super().__init__(text)
        self.distance = distance


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a module was imported from, so that it can be exported as it was.

    Attributes:
        dialect: the code base.
        kind: the source class.
        buffers: source arrays that are not parameters, whose bits differ from the computed ones.
        config: the source config, where there was one.
        architecture: what the module computed when it came, see ``architecture_of``.
        is_published: whether the arrays lay as in files, and not as in the class.
    """

    dialect: StateDictAdapter
    kind: str
    buffers: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    architecture: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_published: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """One import or export.

    Attributes:
        module: the target, with shapes in place of weights.
        links: which arrays hold the same numbers.
        tensors: the results by name, to be read in this order: target arrays of an import, source
            arrays of an export.
        origin: the dialect and class of the source side.
        module_mapping: of that class.
        dropped: source arrays that were ignored on request.
        order: of an import, the names of the source arrays in their order, wrappers removed.
    """

    module: Any
    links: list[Link]
    tensors: dict[str, StoredTensor]
    origin: Origin
    module_mapping: ModuleMapping
    dropped: tuple[str, ...] = ()
    order: tuple[str, ...] = ()


def plan_import(
    tensors: Tensors,
    dialect: StateDictAdapter,
    *,
    kinds: Sequence[str] = (),
    module: Any = None,
    config: Any = None,
    ignore: Sequence[str] = (),
) -> Plan:
    """Plans how source arrays become a jaxformer module.

    Args:
        tensors: of the source, by name.
        dialect: the code base that the names are of.
        kinds: names of the class, the most special first; default the class with these arrays.
        module: the PyTorch module, to read settings from.
        config: a source config (a mapping), a jaxformer config, or a jaxformer module.
        ignore: patterns of names to leave out, ``bert.pooler.*``; settings of a config that the
            class does not know may be named too.

    Raises:
        CheckpointError: arrays are missing, unexpected, of another shape, or do not hold the right
            values; all are listed.
        UsageError: the settings are missing or unsupported.
    """
    match = match_arrays(tensors, dialect, kinds=kinds, module=module, config=config, ignore=ignore)
    target, links, named = match.module, match.links, match.tensors
    buffers = _check_the_rest(match.module_mapping, target, links, named)
    origin = Origin(
        dialect,
        match.kind,
        buffers,
        match.settings,
        architecture_of(target),
        match.is_published,
    )
    read = import_tensors(links, named)
    return Plan(target, links, read, origin, match.module_mapping, match.dropped, tuple(named))


def plan_export(
    module: Any,
    tensors: Tensors,
    dialect: StateDictAdapter,
    *,
    origin: Origin | None = None,
    is_published: bool = False,
) -> Plan:
    """Plans how a jaxformer module becomes source arrays.

    Args:
        module: the target; its weights are not read.
        tensors: its parameters, by name.
        dialect: the code base to export to.
        origin: where the module was imported from, if it was.
        is_published: whether the arrays are to lie as in files; they do if they came so.

    Raises:
        CannotHoldError: the dialect has no class that computes the same; all differences are
            listed.
        UsageError: it has no class of such a kind.
    """
    candidates = dialect.for_module(module)
    if origin is not None and origin.dialect.name == dialect.name:
        known = dialect.for_class([origin.kind])
        candidates = [c for c in candidates if c is known] or candidates
    else:
        origin = None
    if is_published or (origin is not None and origin.is_published):
        candidates = [c.as_published() for c in candidates]
    if not candidates:
        raise UsageError(
            f"{dialect.name} has nothing that computes what {type(module).__name__} does: it has "
            + ", ".join(dialect.classes())
        )
    attempts = []
    for module_mapping in candidates:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        links, unmatched = link(module_mapping.rules_for(module), shapes)
        problems = [f"no place for {name}" for name in unmatched]
        plan = _export(module, tensors, links, module_mapping, origin or Origin(dialect, ""))
        # A module that is as it came can go back, even where its class has no such setting.
        same = origin is not None and origin.architecture == architecture_of(module)
        cannot_be_built = False
        try:
            problems += [] if same else _differences(module, plan, module_mapping, unmatched)
        except JaxformerError as error:
            problems.append(str(error))
            cannot_be_built = True
        if not problems:
            return plan
        attempts.append(
            ((cannot_be_built, len(unmatched), len(problems)), problems, module_mapping)
        )
    distance, problems, module_mapping = min(attempts, key=lambda attempt: attempt[0])
    raise CannotHoldError(
        f"{dialect.name}'s {module_mapping.source[0]} cannot hold this {type(module).__name__}: "
        + "; ".join(problems),
        distance,
    )


def plan_class_export(module: Any, tensors: Tensors, origin: Origin) -> Plan:
    """Plans an export to the arrays of the source's class, which those of its files may not be.

    For the arguments see ``plan_export``.
    """
    origin = dataclasses.replace(origin, is_published=False)
    return plan_export(module, tensors, origin.dialect, origin=origin)


def as_class(plan: Plan) -> Plan:
    """Returns an import whose source arrays are those of the class, where its files have others.

    A Mixtral's files have the matrices of each expert apart, its class has them in one array.
    """
    if not plan.origin.is_published:
        return plan
    own = plan_class_export(plan.module, plan.tensors, plan.origin)
    return dataclasses.replace(
        plan, links=own.links, origin=own.origin, module_mapping=own.module_mapping
    )


def _check_the_rest(
    module_mapping: ModuleMapping, target: Any, links: Iterable[Link], tensors: Tensors
) -> dict[str, np.ndarray]:
    """Checks the values of tied arrays and buffers.

    Returns:
        The buffers whose bits differ from the computed ones.

    Raises:
        CheckpointError: some do not agree; all are listed.
    """
    links = list(links)
    names = {name for each in links for name in each.source}
    dtype = _common_dtype(links, tensors)
    problems = []
    for alias, name in module_mapping.aliases.items():
        tied = alias in tensors and name in tensors and alias not in names
        if tied and not _same(tensors[alias], tensors[name]):
            problems.append(f"{alias} must equal {name}, which it is tied to, and does not")
    kept: dict[str, np.ndarray] = {}
    # Masks are the same in every layer: their bits are held once.
    shared: dict[Any, np.ndarray] = {}
    for name, tensor in tensors.items():
        buffer = next((b for b in module_mapping.buffers if b.matches(name)), None)
        if name in names or buffer is None:
            continue
        stored = tensor.read()
        difference = buffer.differs(stored, target)
        if difference is not None:
            problems.append(f"the buffer {name} {difference}")
            continue
        expected = buffer.values(target, stored.shape)
        is_known = _holds(expected, stored) and _holds(_in_dtype(expected, dtype), stored)
        if not (buffer.written and is_known):
            key = (stored.shape, stored.dtype, digest(stored))
            kept[name] = shared.setdefault(key, stored)
    if problems:
        raise CheckpointError("; ".join(problems))
    return kept


def _export(
    module: Any,
    tensors: Tensors,
    links: list[Link],
    module_mapping: ModuleMapping,
    origin: Origin,
) -> Plan:
    written = export_tensors(links, tensors)
    dtype = _common_dtype(links, written)
    for alias, name in module_mapping.aliases.items():
        if alias not in written and name in written:
            shared = ("tied", name)
            written[name] = dataclasses.replace(written[name], storage=shared)
            written[alias] = dataclasses.replace(written[name], storage=shared)
    for buffer in module_mapping.buffers:
        for name in _buffer_names(buffer, list(written)) if buffer.written else ():
            values = origin.buffers.get(name)
            values = _in_dtype(buffer.values(module, None), dtype) if values is None else values
            if values is not None:
                written[name] = StoredTensor.of(values)
    for name in origin.buffers.keys() - written.keys():
        written[name] = StoredTensor.of(origin.buffers[name])
    origin = dataclasses.replace(origin, kind=origin.kind or module_mapping.source[0])
    return Plan(module, links, written, origin, module_mapping)


def _common_dtype(links: Iterable[Link], tensors: Tensors) -> np.dtype | None:
    """Returns the dtype that all parameters of the source have, or None if they have several."""
    dtypes = {tensors[name].dtype for each in links for name in each.source}
    return dtypes.pop() if len(dtypes) == 1 else None


def _in_dtype(values: np.ndarray | None, dtype: np.dtype | None) -> np.ndarray | None:
    """Returns a computed buffer as a module of this dtype holds it: a table of floats has it."""
    if values is None or dtype is None or values.dtype.kind in "biu":
        return values
    return values.astype(dtype, copy=False)


def _differences(
    module: Any, plan: Plan, module_mapping: ModuleMapping, unmatched: Sequence[str]
) -> list[str]:
    """Returns how the source class, given the exported arrays, would differ from the module.

    Raises:
        JaxformerError: the class cannot be built with them.
    """
    linked = {name for each in plan.links for name in each.source}
    source_model = SourceModel(
        # Without second names, by which a class would take a tied head for one of its own.
        {
            name: tensor.shape
            for name, tensor in plan.tensors.items()
            if name in linked or name not in module_mapping.aliases
        },
        kind=plan.origin.kind,
        config=module_mapping.settings(module),
    )
    again = build_abstract(module_mapping, source_model, None)
    wanted = architecture_of(module) | {
        f"the shape of {k}": v for k, v in parameter_shapes(module).items()
    }
    had = architecture_of(again) | {
        f"the shape of {k}": v for k, v in parameter_shapes(again).items()
    }
    skipped = {f"the shape of {name}" for name in unmatched}
    # What holds for every layer is said once.
    return list(
        dict.fromkeys(
            f"{re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', name)} is {wanted.get(name)!r} in jaxformer "
            f"and {had.get(name)!r} in {plan.origin.dialect.name}"
            for name in sorted(wanted.keys() | had.keys())
            if wanted.get(name) != had.get(name)
            and name not in skipped
            and name.rpartition(".")[2] not in module_mapping.translated
        )
    )


def _buffer_names(buffer: Buffer, written: Sequence[str]) -> list[str]:
    """Returns the names of a buffer in every module that has it."""
    if "*" not in buffer.source:
        return [buffer.source]
    owner, _, leaf = buffer.source.rpartition(".")
    pattern = re.compile("(" + re.escape(owner).replace(r"\*", r"\d+") + r")\..*")
    owners = dict.fromkeys(m.group(1) for name in written if (m := pattern.fullmatch(name)))
    return [f"{name}.{leaf}" for name in owners]


def _same(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors hold the same bits; only one of them is in memory at a time."""
    if first.storage is not None and first.storage == second.storage:
        return True
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False

    return digest(first.read()) == digest(second.read())


def _holds(expected: np.ndarray | None, stored: np.ndarray) -> bool:
    """Whether the stored bits are the computed ones."""
    return (
        expected is not None and expected.dtype == stored.dtype and np.array_equal(stored, expected)
    )
