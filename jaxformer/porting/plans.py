"""What a port will do, worked out from names, shapes and settings before any weight is read.

A plan pairs every array of theirs with arrays of ours, each exactly once, or is refused with all
that is wrong. Its tensors are read as they are asked for, so that a port holds one at a time.
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.errors import CheckpointError, JaxformerError, UsageError
from jaxformer.layers import Dropout
from jaxformer.parameters import abstract
from jaxformer.porting.dialect import Buffer, Counterpart, Dialect
from jaxformer.porting.foreign import Foreign, MissingSettingError
from jaxformer.porting.limits import check_config, check_settings
from jaxformer.porting.rules import Link, Shape, contiguous, link
from jaxformer.porting.tensors import StoredTensor, digest
from jaxformer.positions import RotaryScaling
from jaxformer.transformer_lm import TransformerLM

WRAPPERS = ("_orig_mod.", "module.")
OUR_CONFIGS = {TransformerLMConfig: TransformerLM, EncoderDecoderConfig: EncoderDecoder}
Tensors = Mapping[str, StoredTensor]

# Where the classes are defined that compute; those in porting only rename their arguments.
_COMPONENTS = {
    f"jaxformer.{name}"
    for name in (
        "attention", "blocks", "encoder_decoder", "feed_forward", "heads", "layers", "norms",
        "positions", "transformer_lm",
    )
}  # fmt: skip
# Settings that the model reads itself; its parts show the others.
_USED_BY_THE_MODEL = (
    "causal", "sliding_window", "full_attention_layers", "embedding_scale", "logit_soft_cap",
    "head", "pooler", "num_token_types", "tie_embeddings",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a module of ours came from, so that it can go back as it was.

    Attributes:
        dialect: the code base.
        kind: the class.
        buffers: arrays that are no parameters, whose bits are not those that we would write.
        config: the foreign config, where there was one.
        facts: what the module computed when it came, see ``_facts``.
    """

    dialect: Dialect
    kind: str
    buffers: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A port, worked out.

    Attributes:
        module: ours, with shapes in place of weights.
        links: which arrays hold the same numbers.
        tensors: what the port gives, by its new names, to be read in this order.
        origin: whose names theirs are.
        counterpart: the class.
        dropped: their arrays that were ignored on request.
        order: of an import, the names of their arrays as they came, wrappers taken off.
    """

    module: Any
    links: list[Link]
    tensors: dict[str, StoredTensor]
    origin: Origin
    counterpart: Counterpart
    dropped: tuple[str, ...] = ()
    order: tuple[str, ...] = ()


def plan_import(
    tensors: Tensors,
    dialect: Dialect,
    *,
    kinds: Sequence[str] = (),
    module: Any = None,
    config: Any = None,
    ignore: Sequence[str] = (),
) -> Plan:
    """Works out how their arrays become a module of ours.

    Args:
        tensors: theirs, by name.
        dialect: whose names these are.
        kinds: names of the class, the most special first; default the one whose arrays these are.
        module: the PyTorch module, to read settings off.
        config: a config of theirs (a mapping), one of ours, or a module of ours.
        ignore: patterns of names to leave out, ``bert.pooler.*``.

    Raises:
        CheckpointError: arrays are missing, unexpected, of another shape, or do not hold what they
            must; all are listed.
        UsageError: the settings do not make a model of ours.
    """
    match = match_arrays(tensors, dialect, kinds=kinds, module=module, config=config, ignore=ignore)
    ours, links, named = match.module, match.links, match.tensors
    buffers = _check_the_rest(match.counterpart, ours, links, named)
    origin = Origin(dialect, match.kind, buffers, match.settings, facts(ours))
    read = import_tensors(links, named)
    return Plan(ours, links, read, origin, match.counterpart, match.dropped, tuple(named))


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

    counterpart: Counterpart
    kind: str
    module: Any
    links: list[Link]
    tensors: dict[str, StoredTensor]
    settings: Mapping[str, Any]
    dropped: tuple[str, ...]


def match_arrays(
    tensors: Tensors,
    dialect: Dialect,
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
        kind = next((k for k in kinds if k in counterpart.theirs), counterpart.theirs[0])
        foreign = Foreign(
            {name: tensor.shape for name, tensor in named.items()},
            kind=kind,
            module=module,
            config=settings,
        )
        try:
            ours = _skeleton(counterpart, foreign, config)
        except JaxformerError as error:
            attempts.append(_failure(error, counterpart, foreign, named))
            continue
        links, problems = _pair(counterpart, ours, named)
        if problems:
            attempts.append((len(problems), _not_those_of(foreign, problems)))
            continue
        return Match(counterpart, kind, ours, links, named, settings, dropped)
    raise min(attempts, key=lambda attempt: attempt[0])[1]


def plan_export(
    module: Any, tensors: Tensors, dialect: Dialect, *, origin: Origin | None = None
) -> Plan:
    """Works out how a module of ours becomes their arrays.

    Args:
        module: ours; its weights are not looked at.
        tensors: its parameters, by name.
        dialect: whose names are wanted.
        origin: where the module came from, if it was ported.

    Raises:
        UsageError: the dialect has no class that computes what the module does; all that stands
            against it is listed.
    """
    candidates = dialect.for_module(module)
    if origin is not None and origin.dialect.name == dialect.name:
        known = dialect.for_class([origin.kind])
        candidates = [c for c in candidates if c is known] or candidates
    else:
        origin = None
    if not candidates:
        raise UsageError(
            f"{dialect.name} has nothing that computes what {type(module).__name__} does: it has "
            + ", ".join(dialect.classes())
        )
    attempts = []
    for counterpart in candidates:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        links, homeless = link(counterpart.rules_for(module), shapes)
        problems = [f"there is no place for {name}" for name in homeless]
        plan = _export(module, tensors, links, counterpart, origin or Origin(dialect, ""))
        # A module that is as it came can go back, even where its class has no such setting.
        same = origin is not None and origin.facts == facts(module)
        cannot_be_built = False
        try:
            problems += [] if same else _differences(module, plan, counterpart, homeless)
        except JaxformerError as error:
            problems.append(str(error))
            cannot_be_built = True
        if not problems:
            return plan
        attempts.append(((cannot_be_built, len(homeless), len(problems)), problems, counterpart))
    _, problems, counterpart = min(attempts, key=lambda attempt: attempt[0])
    raise UsageError(
        f"{dialect.name}'s {counterpart.theirs[0]} cannot hold this {type(module).__name__}: "
        + "; ".join(problems)
    )


def import_tensors(links: Iterable[Link], tensors: Tensors) -> dict[str, StoredTensor]:
    """Ours from theirs by the links, to be read in this order: parameters or moments."""
    return {name: tensor for each in links for name, tensor in _ours_of(each, tensors)}


def export_tensors(links: Iterable[Link], tensors: Tensors) -> dict[str, StoredTensor]:
    """Theirs from ours by the links, to be read in this order: parameters or moments."""
    return {name: tensor for each in links for name, tensor in _theirs_of(each, tensors)}


def _candidates(dialect: Dialect, kinds: Sequence[str], config: Any) -> list[Counterpart]:
    if kinds:
        counterpart = dialect.for_class(kinds)
        if counterpart is None:
            raise UsageError(
                f"{dialect.name} has no class {kinds[0]}: it has {', '.join(dialect.classes())}"
            )
        return [counterpart]
    ours = OUR_CONFIGS.get(type(config), type(config) if isinstance(config, nnx.Module) else None)
    fitting = [
        c
        for c in dialect.counterparts
        if (issubclass(ours, c.ours) if ours else c.rules or c.buffers)
    ]
    if not fitting:
        raise UsageError(f"{dialect.name} has no counterpart of {type(config).__name__}")
    return fitting


def _failure(
    error: JaxformerError, counterpart: Counterpart, foreign: Foreign, tensors: Tensors
) -> tuple[float, JaxformerError]:
    """What to say of a class that could not be built, and how far it was from it.

    Where an array is missing that tells a size, the size is guessed, to list all that is missing.
    """
    if isinstance(error, MissingSettingError):
        return 0.5, error
    if isinstance(error, CheckpointError) and not foreign.guess:
        foreign.guess = True
        try:
            _, problems = _pair(counterpart, _skeleton(counterpart, foreign, None), tensors)
        except JaxformerError:
            problems = []
        problems = [p for p in problems if p.startswith(("missing", "unexpected"))]
        if problems:
            return len(problems), _not_those_of(foreign, problems)
    return len(tensors) + 1, error


def _not_those_of(foreign: Foreign, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"the arrays are not those of {foreign.kind}: {'; '.join(problems)}")


class _SameKey:
    """Stands for ``nnx.Rngs`` where nothing is drawn: counting its keys takes most of the time."""

    def __init__(self) -> None:
        self.key = jax.random.key(0)

    def params(self) -> jax.Array:
        """A key."""
        return self.key


def _skeleton(counterpart: Counterpart, foreign: Foreign, config: Any) -> Any:
    """Our module with shapes in place of weights."""
    if isinstance(config, nnx.Module):
        return config
    keys: Any = _SameKey()
    try:
        if type(config) in OUR_CONFIGS:
            build = OUR_CONFIGS[type(config)]
            module = nnx.eval_shape(lambda: build(config, rngs=keys))
        else:
            module = nnx.eval_shape(lambda: counterpart.build(foreign, keys))
    except JaxformerError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Settings come from files: they may be of any type and value.
        reason = str(error) or type(error).__name__
        raise UsageError(f"these settings make no {foreign.kind}: {reason}") from error
    if type(getattr(module, "config", None)) in OUR_CONFIGS:
        check_config(module.config)
    return module


def shapes_of(module: Any) -> dict[str, Shape]:
    """The shapes of a module's parameters, by name; weights may be left out of the module."""
    return {name: value.shape for name, value in abstract(lambda: module)[1].items()}


def _pair(counterpart: Counterpart, ours: Any, tensors: Tensors) -> tuple[list[Link], list[str]]:
    """The links, and what is missing, unexpected or of another shape."""
    links, homeless = link(counterpart.rules_for(ours), shapes_of(ours))
    problems = [f"there is no name for our {name}" for name in homeless]
    expected: dict[str, tuple[Link, Shape]] = {}
    for each in links:
        for name, shape in zip(each.theirs, each.their_shapes, strict=True):
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
        ours_here = ", ".join(expected[name][0].ours)
        problems.append(f"missing {name} (our {ours_here})" + _suggest(name, unexpected))
    problems += [f"unexpected {name}" for name in unexpected]
    found = expected.keys() & tensors.keys()
    for name in sorted(found):
        each, shape = expected[name]
        if tensors[name].shape != shape:
            problems.append(
                f"{name} has shape {tensors[name].shape}, not {shape} "
                f"(our {', '.join(each.ours)} of {', '.join(map(str, each.our_shapes))})"
            )
    dtypes = {tensors[name].dtype for name in found}
    problems += [f"the dtype {d} is no float" for d in dtypes if not _is_float(d)]
    return links, problems


def _check_the_rest(
    counterpart: Counterpart, ours: Any, links: Iterable[Link], tensors: Tensors
) -> dict[str, np.ndarray]:
    """Compares second names and buffers with what they must hold.

    Returns:
        The buffers whose bits are not those that we compute.

    Raises:
        CheckpointError: some do not agree; all are listed.
    """
    names = {name for each in links for name in each.theirs}
    problems = []
    for alias, name in counterpart.aliases.items():
        tied = alias in tensors and name in tensors and alias not in names
        if tied and not _same(tensors[alias], tensors[name]):
            problems.append(f"{alias} must equal {name}, which it is tied to, and does not")
    kept: dict[str, np.ndarray] = {}
    # Masks are the same in every layer: their bits are held once.
    shared: dict[Any, np.ndarray] = {}
    for name, tensor in tensors.items():
        buffer = next((b for b in counterpart.buffers if b.matches(name)), None)
        if name in names or buffer is None:
            continue
        stored = tensor.read()
        difference = buffer.differs(stored, ours)
        if difference is not None:
            problems.append(f"the buffer {name} {difference}")
        elif not (buffer.written and _holds(buffer.values(ours, stored.shape), stored)):
            key = (stored.shape, stored.dtype, digest(stored))
            kept[name] = shared.setdefault(key, stored)
    if problems:
        raise CheckpointError("; ".join(problems))
    return kept


def _export(
    module: Any,
    tensors: Tensors,
    links: list[Link],
    counterpart: Counterpart,
    origin: Origin,
) -> Plan:
    written = export_tensors(links, tensors)
    for alias, name in counterpart.aliases.items():
        if alias not in written and name in written:
            shared = ("tied", name)
            written[name] = dataclasses.replace(written[name], storage=shared)
            written[alias] = dataclasses.replace(written[name], storage=shared)
    for buffer in counterpart.buffers:
        for name in _buffer_names(buffer, list(written)) if buffer.written else ():
            values = origin.buffers.get(name)
            values = buffer.values(module, None) if values is None else values
            if values is not None:
                written[name] = StoredTensor.of(values)
    for name in origin.buffers.keys() - written.keys():
        written[name] = StoredTensor.of(origin.buffers[name])
    origin = dataclasses.replace(origin, kind=origin.kind or counterpart.theirs[0])
    return Plan(module, links, written, origin, counterpart)


def _differences(
    module: Any, plan: Plan, counterpart: Counterpart, homeless: Sequence[str]
) -> list[str]:
    """What the class of theirs would do otherwise than our module, had it these arrays.

    Raises:
        JaxformerError: they make none of its modules.
    """
    foreign = Foreign(
        {name: tensor.shape for name, tensor in plan.tensors.items()},
        kind=plan.origin.kind,
        config=counterpart.settings(module),
    )
    again = _skeleton(counterpart, foreign, None)
    wanted = facts(module) | {f"the shape of {k}": v for k, v in shapes_of(module).items()}
    had = facts(again) | {f"the shape of {k}": v for k, v in shapes_of(again).items()}
    skipped = {f"the shape of {name}" for name in homeless}
    # What holds for every layer is said once.
    return list(
        dict.fromkeys(
            f"{re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', name)} is {wanted.get(name)!r} here and "
            f"{had.get(name)!r} there"
            for name in sorted(wanted.keys() | had.keys())
            if wanted.get(name) != had.get(name)
            and name not in skipped
            and name.rpartition(".")[2] not in counterpart.translated
        )
    )


def facts(module: Any) -> dict[str, Any]:
    """All that decides what a module computes, beside its weights; rates of dropout do not."""
    facts: dict[str, Any] = {}
    for path, node in nnx.iter_modules(module):
        kinds = [c.__name__ for c in type(node).__mro__ if c.__module__ in _COMPONENTS]
        if isinstance(node, Dropout) or not kinds:
            continue
        at = ".".join(map(str, path))
        facts[at or "the class"] = kinds[0]
        values = dict(vars(node))
        config = values.pop("config", None)
        if isinstance(config, TransformerLMConfig | EncoderDecoderConfig):
            values |= {name: getattr(config, name, None) for name in _USED_BY_THE_MODEL}
        for name, value in values.items():
            if isinstance(value, RotaryScaling):
                # Of a linear one the other numbers are not used.
                value = value.factor if value.kind == "linear" else dataclasses.astuple(value)
            if name.startswith("_") or not isinstance(value, int | float | str | tuple | None):
                continue
            facts[f"{at}.{name}".removeprefix(".")] = value
    return facts


def _ours_of(each: Link, tensors: Tensors) -> list[tuple[str, StoredTensor]]:
    sources = [tensors[name] for name in each.theirs]
    return _converted(each.ours, each.our_shapes, sources, each.view_as_ours)


def _theirs_of(each: Link, tensors: Tensors) -> list[tuple[str, StoredTensor]]:
    sources = [tensors[name] for name in each.ours]
    return _converted(each.theirs, each.their_shapes, sources, each.view_as_theirs)


def _converted(
    names: Sequence[str],
    shapes: Sequence[Shape],
    sources: Sequence[StoredTensor],
    convert: Callable[[Sequence[np.ndarray]], list[np.ndarray]],
) -> list[tuple[str, StoredTensor]]:
    """Tensors that are converted together when the first of them is read, and then handed out."""
    waiting: dict[int, np.ndarray] = {}

    def view(place: int) -> np.ndarray:
        if place not in waiting:
            waiting.clear()
            waiting.update(enumerate(convert([_view(source) for source in sources])))
        return waiting.pop(place)

    def tensor(place: int, shape: Shape) -> StoredTensor:
        read = _Read(functools.partial(view, place))
        return StoredTensor(shape, sources[0].dtype, read)

    return [
        (name, tensor(place, shape))
        for place, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]


@dataclasses.dataclass(frozen=True)
class _Read:
    """Reads a converted tensor, and gives a view of it to whoever converts it further.

    What is transposed on the way in and again on the way out is never copied: a port from one
    PyTorch layout to another holds a matrix once.
    """

    view: Callable[[], np.ndarray]

    def __call__(self) -> np.ndarray:
        return contiguous(self.view())


def _view(source: StoredTensor) -> np.ndarray:
    return source.read.view() if isinstance(source.read, _Read) else source.read()


def unwrap(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Without what torch.compile and data parallelism put before every name."""
    named = dict(tensors)
    for wrapper in (*WRAPPERS, *WRAPPERS):
        if named and all(name.startswith(wrapper) for name in named):
            named = {name[len(wrapper) :]: tensor for name, tensor in named.items()}
    return named


def _prefixed(
    tensors: Tensors, dialect: Dialect, counterpart: Counterpart
) -> dict[str, StoredTensor]:
    """With the prefix of a whole model where the class has it, and without where it has not."""
    prefix = counterpart.prefix or dialect.prefix
    tensors = {_today(name, dialect): tensor for name, tensor in tensors.items()}
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


def _today(name: str, dialect: Dialect) -> str:
    """What files of today call an array."""
    for old, new in dialect.old_names.items():
        name = re.sub(old, new, name)
    return name


def _buffer_names(buffer: Buffer, written: Sequence[str]) -> list[str]:
    """The names of a buffer in every module that has it."""
    if "*" not in buffer.theirs:
        return [buffer.theirs]
    owner, _, leaf = buffer.theirs.rpartition(".")
    pattern = re.compile("(" + re.escape(owner).replace(r"\*", r"\d+") + r")\..*")
    owners = dict.fromkeys(m.group(1) for name in written if (m := pattern.fullmatch(name)))
    return [f"{name}.{leaf}" for name in owners]


def _suggest(name: str, unexpected: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, unexpected, 1, 0.75)
    return f" (is it {close[0]}?)" if close else ""


def _same(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors hold the same bits; only one of them is in memory at a time."""
    if first.storage is not None and first.storage == second.storage:
        return True
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False

    return digest(first.read()) == digest(second.read())


def _holds(expected: np.ndarray | None, stored: np.ndarray) -> bool:
    """Whether the bits are those that would be written."""
    return (
        expected is not None and expected.dtype == stored.dtype and np.array_equal(stored, expected)
    )


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))
