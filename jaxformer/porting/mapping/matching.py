"""Finds the class of a dialect that has given arrays, by names and shapes; reads none of them."""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np
from flax import nnx

from jaxformer.errors import CheckpointError, JaxformerError, UsageError
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import (
    MODEL_OF_CONFIG,
    build_abstract,
    parameter_shapes,
)
from jaxformer.porting.mapping.adapter import ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.packings import Shape
from jaxformer.porting.mapping.rules import Link, link
from jaxformer.porting.mapping.source_model import MissingSettingError, SourceModel
from jaxformer.porting.mapping.transfer import Tensors
from jaxformer.porting.mapping.validation import check_settings
from jaxformer.porting.mapping.wrapped_names import MODEL_ATTRIBUTE, common_attribute, unwrap

Array = TypeVar("Array")


@dataclasses.dataclass(frozen=True)
class Match:
    """The class that given arrays belong to.

    Attributes:
        module_mapping: of the class.
        kind: the name of the source class.
        module: the target, with shapes in place of weights.
        links: which arrays hold the same numbers.
        tensors: of the source, by the names that the class has for them.
        settings: the source config, where there was one.
        dropped: source arrays that were ignored on request.
        is_published: whether the arrays lie as in files, and not as in the class.
    """

    module_mapping: ModuleMapping
    kind: str
    module: Any
    links: list[Link]
    tensors: dict[str, StoredTensor]
    settings: Mapping[str, Any]
    dropped: tuple[str, ...]
    is_published: bool = False


def match_arrays(
    tensors: Tensors,
    dialect: StateDictAdapter,
    *,
    kinds: Sequence[str] = (),
    module: Any = None,
    config: Any = None,
    ignore: Sequence[str] = (),
) -> Match:
    """Finds the class of a dialect that has these arrays; nothing is read.

    Arguments and errors as in ``plan_import``.
    """
    tensors = unwrap(tensors)
    options = {"kinds": kinds, "module": module, "config": config, "ignore": ignore}
    try:
        return _match_named(tensors, dialect, **options)
    except JaxformerError:
        kept = {name: tensor for name, tensor in tensors.items() if not _is_ignored(name, ignore)}
        attribute = common_attribute(kept)
        if not attribute or module is not None:
            raise
        inside = {name.removeprefix(attribute): tensor for name, tensor in kept.items()}
        try:
            found = _match_named(unwrap(inside), dialect, **options)
        except JaxformerError:
            found = None
        if found is None:
            raise
    if attribute != MODEL_ATTRIBUTE:
        raise CheckpointError(
            f"all names begin with {attribute}, and without it they are those of {found.kind}: "
            "take it away from them"
        )
    left = tuple(name for name in tensors if name not in kept)
    return dataclasses.replace(found, dropped=(*left, *found.dropped))


def _is_ignored(name: str, ignore: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in ignore)


def _match_named(
    tensors: Tensors,
    dialect: StateDictAdapter,
    *,
    kinds: Sequence[str],
    module: Any,
    config: Any,
    ignore: Sequence[str],
) -> Match:
    """Finds the class that has arrays of exactly these names, but for what is ignored."""
    dropped = tuple(name for name in tensors if _is_ignored(name, ignore))
    tensors = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    if module is None:
        # A module in memory has shown that its settings can be.
        check_settings(config, len(tensors))
    settings = dict(config) if isinstance(config, Mapping) else {}
    if not kinds and isinstance(settings.get("class"), str):
        kinds = (settings["class"],)
    attempts = []
    for module_mapping in _candidates(dialect, kinds, config):
        named = names_of_class(tensors, dialect, module_mapping)
        left = [n for n in named if any(fnmatchcase(n, p) for p in module_mapping.superfluous)]
        named = {name: tensor for name, tensor in named.items() if name not in left}
        kind = next((k for k in kinds if k in module_mapping.source), module_mapping.source[0])
        source_model = SourceModel(
            {name: tensor.shape for name, tensor in named.items()},
            kind=kind,
            module=module,
            config=settings,
            ignore=ignore,
            storages={name: tensor.storage for name, tensor in named.items()},
        )
        try:
            target = build_abstract(module_mapping, source_model, config)
        except JaxformerError as error:
            attempts.append(_failure(error, module_mapping, source_model, named))
            continue
        is_published, links, problems = _pair_by_layout(module_mapping, target, named)
        if problems:
            attempts.append((len(problems), _not_those_of(source_model, problems)))
            continue
        found = module_mapping.as_published() if is_published else module_mapping
        dropped = (*dropped, *left)
        return Match(found, kind, target, links, named, settings, dropped, is_published)
    raise min(attempts, key=lambda attempt: attempt[0])[1]


def _candidates(
    dialect: StateDictAdapter, kinds: Sequence[str], config: Any
) -> list[ModuleMapping]:
    if kinds:
        module_mapping = dialect.for_class(kinds)
        if module_mapping is None:
            raise UsageError(
                f"{dialect.name} has no class {kinds[0]}: it has {', '.join(dialect.classes())}"
            )
        return [module_mapping]
    target = MODEL_OF_CONFIG.get(
        type(config), type(config) if isinstance(config, nnx.Module) else None
    )
    fitting = [
        c
        for c in dialect.module_mappings
        if (issubclass(target, c.target) if target else c.rules or c.buffers)
    ]
    if not fitting:
        raise UsageError(f"{dialect.name} has no class for a {type(config).__name__}")
    if target:
        # Its own class before those that it is derived from.
        fitting.sort(key=lambda mapping: target.__mro__.index(mapping.target))
    return fitting


def _failure(
    error: JaxformerError,
    module_mapping: ModuleMapping,
    source_model: SourceModel,
    tensors: Tensors,
) -> tuple[float, JaxformerError]:
    """Returns the error of a class that could not be built, and how many problems it has.

    Where an array is missing that a size is read from, the size is guessed, so that all that is
    missing can be listed.
    """
    if isinstance(error, MissingSettingError):
        return 0.5, error
    if isinstance(error, CheckpointError) and not source_model.guess:
        source_model.guess = True
        try:
            _, problems = pair_arrays(
                module_mapping, build_abstract(module_mapping, source_model, None), tensors
            )
        except JaxformerError:
            problems = []
        problems = [p for p in problems if p.startswith(("missing", "unexpected"))]
        if problems:
            return len(problems), _not_those_of(source_model, problems)
    return len(tensors) + 1, error


def _not_those_of(source_model: SourceModel, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"the arrays are not those of {source_model.kind}: {'; '.join(problems)}"
    )


def pair_arrays(
    module_mapping: ModuleMapping, target: Any, tensors: Tensors
) -> tuple[list[Link], list[str]]:
    """Returns the links, and what is missing, unexpected or of another shape."""
    links, unmatched = link(module_mapping.rules_for(target), parameter_shapes(target))
    problems = [f"no source name for {name}" for name in unmatched]
    expected: dict[str, tuple[Link, Shape]] = {}
    for each in links:
        for name, shape in zip(each.source, each.source_shapes, strict=True):
            expected[name] = (each, shape)
    missing = [name for name in expected if name not in tensors]
    unexpected = [
        name
        for name in tensors
        if name not in expected
        and name not in module_mapping.aliases
        and not any(buffer.matches(name) for buffer in module_mapping.buffers)
    ]
    for name in missing:
        targets = ", ".join(expected[name][0].target)
        problems.append(f"missing {name} (target {targets})" + _suggest(name, unexpected))
    problems += [f"unexpected {name}" for name in unexpected]
    found = expected.keys() & tensors.keys()
    for name in sorted(found):
        each, shape = expected[name]
        if tensors[name].shape != shape:
            problems.append(
                f"{name} has shape {tensors[name].shape}, not {shape} "
                f"(target {', '.join(each.target)} of {', '.join(map(str, each.target_shapes))})"
            )
    dtypes = {tensors[name].dtype for name in found}
    problems += [f"the dtype {d} is not a float" for d in dtypes if not _is_float(d)]
    return links, problems


def _pair_by_layout(
    module_mapping: ModuleMapping, target: Any, tensors: Tensors
) -> tuple[bool, list[Link], list[str]]:
    """Returns what ``pair_arrays`` does, for the layout of the class or of files, and which it is.

    That is the one with fewer problems; that of files where there is nothing to tell them apart.
    """
    found = pair_arrays(module_mapping, target, tensors)
    if found[1] and module_mapping.published is not None:
        other = pair_arrays(module_mapping.as_published(), target, tensors)
        if len(other[1]) <= len(found[1]):
            return True, *other
    return False, *found


def _suggest(name: str, unexpected: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, unexpected, 1, 0.75)
    return f" (is it {close[0]}?)" if close else ""


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def names_of_class(
    tensors: Mapping[str, Array], dialect: StateDictAdapter, module_mapping: ModuleMapping
) -> dict[str, Array]:
    """Returns arrays by today's names, with the prefix of a whole model where the class has it.

    An array that has the second of two names alone is there under both.
    """
    prefix = module_mapping.prefix or dialect.prefix
    tensors = {_rename_legacy(name, dialect): tensor for name, tensor in tensors.items()}
    has_it = any(name.startswith(prefix) for name in tensors)
    named = dict(tensors)
    if module_mapping.prefix and not has_it:
        named = {
            name if name.startswith(module_mapping.outside) else prefix + name: tensor
            for name, tensor in tensors.items()
        }
    elif dialect.prefix and not module_mapping.prefix and has_it:
        named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    for alias, name in module_mapping.aliases.items():
        if alias in named and name not in named:
            named[name] = named[alias]
    return named


def _rename_legacy(name: str, dialect: StateDictAdapter) -> str:
    """Returns what today's files call an array."""
    for old, new in dialect.old_names.items():
        name = re.sub(old, new, name)
    return name
