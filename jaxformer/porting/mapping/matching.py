"""Whose arrays these are: the class of a dialect that has all of them, by names and shapes."""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from flax import nnx

from jaxformer.errors import CheckpointError, JaxformerError, UsageError
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.dialect import ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.limits import check_settings
from jaxformer.porting.mapping.rules import Link, Shape, link
from jaxformer.porting.mapping.skeletons import OUR_CONFIGS, shapes_of, skeleton
from jaxformer.porting.mapping.source_model import MissingSettingError, SourceModel
from jaxformer.porting.mapping.transfer import Tensors

WRAPPERS = ("_orig_mod.", "module.")


@dataclasses.dataclass(frozen=True)
class Match:
    """Arrays that are all those of one class, by their names and shapes.

    Attributes:
        counterpart: the class.
        kind: its name.
        module: ours, with shapes in place of weights.
        links: which arrays hold the same numbers.
        tensors: theirs, by the names that the class has for them.
        settings: the foreign config, where there was one.
        dropped: their arrays that were ignored on request.
    """

    counterpart: ModuleMapping
    kind: str
    module: Any
    links: list[Link]
    tensors: dict[str, StoredTensor]
    settings: Mapping[str, Any]
    dropped: tuple[str, ...]


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
    dropped = tuple(name for name in tensors if any(fnmatchcase(name, p) for p in ignore))
    tensors = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    if module is None:
        # A module in memory has shown that its settings can be.
        check_settings(config, len(tensors))
    settings = dict(config) if isinstance(config, Mapping) else {}
    if not kinds and isinstance(settings.get("class"), str):
        kinds = (settings["class"],)
    attempts = []
    for counterpart in _candidates(dialect, kinds, config):
        named = _prefixed(tensors, dialect, counterpart)
        kind = next((k for k in kinds if k in counterpart.source), counterpart.source[0])
        source_model = SourceModel(
            {name: tensor.shape for name, tensor in named.items()},
            kind=kind,
            module=module,
            config=settings,
        )
        try:
            target = skeleton(counterpart, source_model, config)
        except JaxformerError as error:
            attempts.append(_failure(error, counterpart, source_model, named))
            continue
        links, problems = pair_arrays(counterpart, target, named)
        if problems:
            attempts.append((len(problems), _not_those_of(source_model, problems)))
            continue
        return Match(counterpart, kind, target, links, named, settings, dropped)
    raise min(attempts, key=lambda attempt: attempt[0])[1]


def unwrap(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Without what torch.compile and data parallelism put before every name."""
    named = dict(tensors)
    for wrapper in (*WRAPPERS, *WRAPPERS):
        if named and all(name.startswith(wrapper) for name in named):
            named = {name[len(wrapper) :]: tensor for name, tensor in named.items()}
    return named


def _candidates(
    dialect: StateDictAdapter, kinds: Sequence[str], config: Any
) -> list[ModuleMapping]:
    if kinds:
        counterpart = dialect.for_class(kinds)
        if counterpart is None:
            raise UsageError(
                f"{dialect.name} has no class {kinds[0]}: it has {', '.join(dialect.classes())}"
            )
        return [counterpart]
    target = OUR_CONFIGS.get(type(config), type(config) if isinstance(config, nnx.Module) else None)
    fitting = [
        c
        for c in dialect.counterparts
        if (issubclass(target, c.target) if target else c.rules or c.buffers)
    ]
    if not fitting:
        raise UsageError(f"{dialect.name} has no counterpart of {type(config).__name__}")
    return fitting


def _failure(
    error: JaxformerError, counterpart: ModuleMapping, source_model: SourceModel, tensors: Tensors
) -> tuple[float, JaxformerError]:
    """What to say of a class that could not be built, and how far it was from it.

    Where an array is missing that tells a size, the size is guessed, to list all that is missing.
    """
    if isinstance(error, MissingSettingError):
        return 0.5, error
    if isinstance(error, CheckpointError) and not source_model.guess:
        source_model.guess = True
        try:
            _, problems = pair_arrays(
                counterpart, skeleton(counterpart, source_model, None), tensors
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
    counterpart: ModuleMapping, target: Any, tensors: Tensors
) -> tuple[list[Link], list[str]]:
    """The links, and what is missing, unexpected or of another shape."""
    links, unmatched = link(counterpart.rules_for(target), shapes_of(target))
    problems = [f"there is no name for our {name}" for name in unmatched]
    expected: dict[str, tuple[Link, Shape]] = {}
    for each in links:
        for name, shape in zip(each.source, each.source_shapes, strict=True):
            expected[name] = (each, shape)
    missing = [name for name in expected if name not in tensors]
    unexpected = [
        name
        for name in tensors
        if name not in expected
        and name not in counterpart.aliases
        and not any(buffer.matches(name) for buffer in counterpart.buffers)
    ]
    for name in missing:
        target_here = ", ".join(expected[name][0].target)
        problems.append(f"missing {name} (our {target_here})" + _suggest(name, unexpected))
    problems += [f"unexpected {name}" for name in unexpected]
    found = expected.keys() & tensors.keys()
    for name in sorted(found):
        each, shape = expected[name]
        if tensors[name].shape != shape:
            problems.append(
                f"{name} has shape {tensors[name].shape}, not {shape} "
                f"(our {', '.join(each.target)} of {', '.join(map(str, each.target_shapes))})"
            )
    dtypes = {tensors[name].dtype for name in found}
    problems += [f"the dtype {d} is no float" for d in dtypes if not _is_float(d)]
    return links, problems


def _suggest(name: str, unexpected: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, unexpected, 1, 0.75)
    return f" (is it {close[0]}?)" if close else ""


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def _prefixed(
    tensors: Tensors, dialect: StateDictAdapter, counterpart: ModuleMapping
) -> dict[str, StoredTensor]:
    """With the prefix of a whole model where the class has it, and without where it has not."""
    prefix = counterpart.prefix or dialect.prefix
    tensors = {_rename_legacy(name, dialect): tensor for name, tensor in tensors.items()}
    has_it = any(name.startswith(prefix) for name in tensors)
    named = dict(tensors)
    if counterpart.prefix and not has_it:
        named = {
            name if name.startswith(counterpart.outside) else prefix + name: tensor
            for name, tensor in tensors.items()
        }
    elif dialect.prefix and not counterpart.prefix and has_it:
        named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    for alias, name in counterpart.aliases.items():
        if alias in named and name not in named:
            named[name] = named[alias]
    return named


def _rename_legacy(name: str, dialect: StateDictAdapter) -> str:
    """What files of today call an array."""
    for old, new in dialect.old_names.items():
        name = re.sub(old, new, name)
    return name
