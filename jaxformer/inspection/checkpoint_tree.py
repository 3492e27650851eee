"""What a checkpoint holds, as plain values and as a tree in the terminal."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.markup import escape
from rich.tree import Tree

from jaxformer.config_tree import default_settings, flatten, setting_types
from jaxformer.errors import JaxformerError, Setting, as_keyword
from jaxformer.hardware.screen import Screen
from jaxformer.hardware.units import format_count, format_file_size
from jaxformer.porting.checkpoint import Checkpoint
from jaxformer.porting.formats.detection import FORMAT_NAMES
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG
from jaxformer.porting.mapping.plans import Plan

# Modules by their name and a dot, arrays by their name.
Modules = dict[str, Any]
MAX_WIDTH = 1_000_000


def describe(
    checkpoint: Checkpoint, spell: Callable[[Setting], str] = as_keyword
) -> dict[str, Any]:
    """Returns format, model, settings and arrays of a checkpoint, as plain values.

    ``parameters`` counts tied arrays once, and no buffers where the model is known. ``problem``
    says why a checkpoint cannot be ported.

    Args:
        checkpoint: what is described.
        spell: how ``problem`` names a setting that would help.
    """
    plan, problem = None, None
    try:
        plan = checkpoint.plan()
    except JaxformerError as error:
        problem = error.message(spell)
    tensors = checkpoint.raw.tensors
    ties = [{"name": a, "to": b} for a, b in _ties(tensors, plan)]
    tied = {tie["name"] for tie in ties}
    counted = [t.shape for name, t in tensors.items() if name not in tied]
    if plan is not None:
        counted = [shape for link in plan.links for shape in link.source_shapes]
    record = checkpoint.raw.record
    facts = {
        "path": str(checkpoint.path),
        "format": checkpoint.raw.kind,
        "dialect": checkpoint.dialect if plan is None else plan.origin.dialect.name,
        "class": None if plan is None else plan.origin.kind,
        "problem": problem,
        "parameters": sum(math.prod(shape) for shape in counted),
        "bytes": sum(tensor.nbytes for name, tensor in tensors.items() if name not in tied),
        "dtypes": sorted({tensor.dtype.name for tensor in tensors.values()}),
        "tied": ties,
        "step": record.get("step"),
        "optimizer": checkpoint.raw.optimizer is not None,
        "vocabulary": checkpoint.vocabulary,
        "tokenizer": checkpoint.tokenizer_file and str(checkpoint.tokenizer_file),
        "token_ids": checkpoint.token_ids,
        "config": _config(checkpoint.config),
        "tensors": {
            name: {"shape": list(t.shape), "dtype": t.dtype.name, "bytes": t.nbytes}
            for name, t in tensors.items()
        },
    }
    return {name: value for name, value in facts.items() if value not in (None, {}, [])}


def _config(config: Any) -> Any:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return flatten(config)
    return config


def _ties(tensors: Mapping[str, StoredTensor], plan: Plan | None) -> Iterable[tuple[str, str]]:
    """Yields pairs of names of one array: tied by the model, or with the same storage."""
    if plan is not None:
        # An array with a link of its own is tied to no other.
        linked = {name for link in plan.links for name in link.source}
        for alias, name in plan.module_mapping.aliases.items():
            if alias in plan.order and name in plan.order and alias not in linked:
                yield alias, name
        return
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if tensor.storage is not None and first.setdefault(tensor.storage, name) != name:
            yield name, first[tensor.storage]


def print_tree(title: str, facts: dict[str, Any]) -> None:
    """Prints what ``describe`` returned on standard output, as a tree."""
    console = Screen(highlight=False)
    if not console.is_terminal:
        # Whoever reads the lines next folds them.
        console.width = MAX_WIDTH
    console.print(_tree(title, facts))


def _tree(title: str, facts: dict[str, Any]) -> Tree:
    origin = " ".join(facts[n] for n in ("dialect", "class") if n in facts) or "unknown"
    head = Tree(f"[bold]{escape(title)}[/] · {FORMAT_NAMES[facts['format']]} · {escape(origin)}")
    head.add(
        f"{format_count(facts['parameters'])} parameters, {len(facts['tensors'])} arrays, "
        f"{format_file_size(facts['bytes'])}, {', '.join(facts['dtypes'])}"
    )
    if "problem" in facts:
        head.add(f"[yellow]cannot be ported as it is:[/] {escape(facts['problem'])}")
    for tie in facts.get("tied", []):
        head.add(f"tied: {escape(tie['name'])} = {escape(tie['to'])}")
    if facts["optimizer"]:
        head.add("with the state of an optimizer")
    for name in ("step", "tokenizer", "token_ids"):
        if name in facts:
            head.add(f"{name.replace('_', ' ')}: {escape(str(facts[name]))}")
    if "vocabulary" in facts:
        head.add(f"vocabulary: {len(facts['vocabulary'])} characters")
    if "config" in facts:
        settings = head.add("settings")
        plain = _defaults(facts["config"])
        for name, value in facts["config"].items():
            if name not in plain or value != plain[name]:
                settings.add(f"{escape(str(name))}: {escape(repr(value))}")
    _build_tree(head.add("arrays"), facts["tensors"])
    return head


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of the settings if they are those of a jaxformer model, else none."""
    for cls in MODEL_OF_CONFIG:
        if config.keys() == setting_types(cls).keys():
            return default_settings(cls)
    return {}


def _build_tree(root: Tree, tensors: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds a branch for every module and a leaf for every array; equal modules share a branch."""
    modules: Modules = {}
    for name, tensor in tensors.items():
        *owners, leaf = name.split(".")
        inner = modules
        for owner in owners:
            inner = inner.setdefault(f"{owner}.", {})
        inner[leaf] = tensor
    _add_modules(root, modules)


def _add_modules(branch: Tree, modules: Modules) -> None:
    places = sorted(modules, key=lambda name: int(name[:-1]) if name[:-1].isdecimal() else -1)
    for _, group in itertools.groupby(places, lambda name: _group_key(name, modules)):
        names = list(group)
        first, what = names[0], modules[names[0]]
        if not first.endswith("."):
            shape = " × ".join(map(str, what["shape"])) or "()"
            size = format_file_size(what["bytes"])
            branch.add(f"{escape(first)} [cyan]{shape}[/] {what['dtype']} [dim]{size}")
            continue
        title = escape(first[:-1]) + (f" … {names[-1][:-1]}, each" if len(names) > 1 else "")
        _add_modules(branch.add(f"{title} [dim]{format_count(_parameters(what))}"), what)


def _group_key(name: str, modules: Modules) -> Any:
    """Returns a key that is the same for modules of a list that are shown as one."""
    return repr(modules[name]) if name[:-1].isdecimal() else name


def _parameters(modules: Modules) -> int:
    return sum(
        _parameters(what) if name.endswith(".") else math.prod(what["shape"])
        for name, what in modules.items()
    )
