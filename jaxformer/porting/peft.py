"""Adapters in PEFT's folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT names an adapter by the module of the base model that it adapts, so a folder is read and
written beside the port of the base model, whose rules say which module is which.

A module may be several layers of jaxformer in one, as GPT-2's ``c_attn`` is. Its adapter is read as
one for each of them, with the same first matrix and their rows of the second. Adapters of such
layers are written with that matrix if it is still the same in all of them, and else with the first
matrices one below the other, and zeros in the second where they do not meet: the same function, of
a higher rank.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.adapters import is_adapter, merge_adapters
from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.config_parts import LINEAR_LAYERS
from jaxformer.errors import CheckpointError, Setting, UsageError
from jaxformer.porting.formats.raw_checkpoints import read_config
from jaxformer.porting.formats.safetensors_files import read_safetensors
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import abstract_model, parameter_shapes
from jaxformer.porting.mapping.packings import (
    ONE_TO_ONE,
    SHARED,
    Packing,
    StackedColumns,
    StackedRows,
)
from jaxformer.porting.mapping.plans import Plan
from jaxformer.porting.mapping.rules import Link, Rule, Rules, link
from jaxformer.porting.mapping.transfer import export_tensors, import_tensors

# The configs of models that hold adapters.
ADAPTED = (TransformerLMConfig, EncoderDecoderConfig)
SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# What stands before the names of the base model's modules.
PREFIX = "base_model.model."
# What PEFT takes where a file does not say it.
DEFAULT_RANK, DEFAULT_ALPHA = 8, 8
# Settings of PEFT that change nothing once an adapter is trained, or that are read here.
HARMLESS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules",
    "exclude_modules", "layers_pattern", "fan_in_fan_out", "megatron_core", "eva_config",
    "loftq_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
# With any other, an adapter computes something else, but for these values and empty ones. An
# adapter that began as a part of the base model's weights has also changed those.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter as PEFT stores it.

    Attributes:
        path: its folder.
        settings: its ``adapter_config.json``.
        tensors: by the names of modules of the base model, ``….lora_A`` and ``….lora_B``.
    """

    path: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def files(self) -> tuple[Path, ...]:
        """Where its settings and its arrays lie."""
        return self.path / SETTINGS, self.path / WEIGHTS

    @property
    def base(self) -> Path:
        """The folder of the base model that the adapter names.

        Raises:
            UsageError: it names none that is here.
        """
        named = self.settings.get("base_model_name_or_path")
        if isinstance(named, str) and named and Path(named).exists():
            return Path(named)
        raise UsageError(
            f"{self.path} holds an adapter of {named or 'an unnamed model'}, which is no folder "
            "here: name its base model with ",
            Setting("base"),
        )


def holds_adapter(path: Path) -> bool:
    """Returns whether a path is a folder of PEFT's."""
    return (path / SETTINGS).is_file()


def read_adapter(path: Path) -> Adapter:
    """Reads an adapter's settings; its arrays are read when they are needed.

    Raises:
        UsageError: it is no plain LoRA.
        CheckpointError: a file is missing or damaged.
    """
    settings = read_config(path / SETTINGS)
    odd = [
        f"{name}={value!r:.60}"
        for name, value in settings.items()
        if value and name not in HARMLESS and value not in WITHOUT_EFFECT.get(name, ())
    ]
    if odd:
        raise UsageError(f"{path} is not a plain LoRA: {', '.join(odd)} is unsupported")
    tensors, _ = read_safetensors(path / WEIGHTS)
    return Adapter(path, settings, tensors)


def add_adapter(plan: Plan, adapter: Adapter) -> Plan:
    """Returns the import of a base model with its adapter.

    Args:
        plan: the import of the base model.
        adapter: of the same model.

    Raises:
        UsageError: the model cannot hold adapters, or not these.
        CheckpointError: arrays are missing, unexpected or misshapen; all are listed.
    """
    config = getattr(plan.module, "config", None)
    if not isinstance(config, ADAPTED):
        raise UsageError(f"adapters go with a language model, and this is a {plan.origin.kind}")
    layers = _adapted(plan, adapter)
    wanted = {name.split(".")[-2] for each in layers.values() for name in each.target}
    try:
        rank = adapter.settings.get("r", DEFAULT_RANK)
        if rank is None:
            raise TypeError("r is null, and must be the rank")
        alpha = float(adapter.settings.get("lora_alpha", DEFAULT_ALPHA))
        if adapter.settings.get("use_rslora"):
            # The product is divided by the root of the rank (arXiv 2312.03732).
            alpha *= math.sqrt(rank)
        config = config.replace(
            lora_rank=rank,
            lora_alpha=alpha,
            lora_dropout=float(adapter.settings.get("lora_dropout") or 0.0),
            lora_targets=",".join(name for name in LINEAR_LAYERS if name in wanted),
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"{adapter.path / SETTINGS}: {error}") from error
    module = abstract_model(config)
    shapes = {name: s for name, s in parameter_shapes(module).items() if is_adapter(name)}
    links, unmatched = link(_rules(layers), shapes)
    problems = [f"no array for {name}" for name in unmatched]
    for each in links:
        (name,), (shape,) = each.source, each.source_shapes
        found = adapter.tensors.get(name)
        if found is None:
            problems.append(f"no {name}")
        elif found.shape != shape:
            problems.append(f"{name} has shape {found.shape}, not {shape}")
    used = {name for each in links for name in each.source}
    problems += [f"unexpected {name}" for name in adapter.tensors if name not in used]
    if problems:
        default = "" if "r" in adapter.settings else f" with PEFT's default r={rank}"
        raise CheckpointError(
            f"{adapter.path} does not fit its model{default}: {'; '.join(problems)}"
        )
    tensors = plan.tensors | import_tensors(links, adapter.tensors)
    return dataclasses.replace(plan, module=module, links=[*plan.links, *links], tensors=tensors)


def adapter_order(plan: Plan, order: Sequence[str]) -> list[str]:
    """Returns the adapters' arrays in the order of the modules of PEFT's model.

    Args:
        plan: the import of a model with its adapter.
        order: the arrays of the base model in the order of its modules; empty if it is not known.

    Raises:
        UsageError: an adapter is one for several layers here, whose moments it does not tell apart.
    """
    links = [each for each in plan.links if is_adapter(each.target[0])]
    several = [each.source[0].removeprefix(PREFIX) for each in links if len(each.target) > 1]
    if several:
        raise UsageError(
            f"unsupported: the optimizer's state of {', '.join(several[:4])}, which adapt several "
            "layers at once: take the weights alone"
        )
    if not order:
        return []
    ranks = {name.removesuffix(".weight"): number for number, name in enumerate(order)}

    def rank(name: str) -> tuple[int, str]:
        module, _, matrix = name.removeprefix(PREFIX).rpartition(".lora_")
        return ranks[_same_module(module, ranks)[0]], matrix

    return sorted((each.source[0] for each in links), key=rank)


def _same_module(name: str, known: Iterable[str]) -> list[str]:
    """Returns what a module is called where the name of the model around it may be left out."""
    return [k for k in known if k == name or name.endswith(f".{k}") or k.endswith(f".{name}")]


def _adapted(plan: Plan, adapter: Adapter) -> dict[str, Link]:
    """Returns the layers in each module of the base model that has an adapter."""
    known = _linear_modules(plan)
    found, unknown = {}, []
    for key in adapter.tensors:
        name, matrix, _ = key.removeprefix(PREFIX).rpartition(".lora_A.weight")
        if not matrix:
            if not key.endswith(".lora_B.weight"):
                unknown.append(key)
            continue
        same = _same_module(name, known)
        if len(same) != 1:
            unknown.append(key)
        else:
            found[name] = known[same[0]]
    if unknown:
        raise UsageError(
            f"{adapter.path} adapts what jaxformer's adapters do not: {', '.join(unknown[:8])}; "
            "merge it with peft's merge_and_unload, and port the whole model"
        )
    return found


def _linear_modules(plan: Plan) -> dict[str, Link]:
    """Returns the linear layers of blocks, by the module of the source that they are."""
    return {
        each.source[0].removesuffix(".weight"): each
        for each in plan.links
        if len(each.source) == 1
        and each.source[0].endswith(".weight")
        and all(
            name.endswith(".kernel") and name.split(".")[-2] in LINEAR_LAYERS
            for name in each.target
        )
    }


def _rules(layers: Mapping[str, Link]) -> Rules:
    """Returns the rules of adapters of which each module has one."""
    return tuple(
        _rule(matrix, each.target, name, packing)
        for name, each in layers.items()
        for matrix, packing in (
            ("a", SHARED if len(each.target) > 1 else ONE_TO_ONE),
            ("b", each.rule.packing),
        )
    )


def _stacked_rules(layers: Mapping[str, Link], adapted: Collection[str]) -> Rules:
    """Returns the rules of adapters of which a module has one for each of its layers."""
    places = {
        name: tuple(n for n, kernel in enumerate(each.target) if kernel in adapted)
        for name, each in layers.items()
    }
    blocks = max(map(len, places.values()))
    rules = []
    for name, each in layers.items():
        chosen = [each.target[place] for place in places[name]]
        outputs = tuple(shape[1] for shape in each.target_shapes)
        columns = StackedColumns(blocks, each.rule.packing, outputs, places[name])
        rules += [
            _rule("a", chosen, name, StackedRows(blocks)),
            _rule("b", chosen, name, columns),
        ]
    return tuple(rules)


def _rule(matrix: str, kernels: Sequence[str], name: str, packing: Packing) -> Rule:
    owners = tuple(f"{kernel.removesuffix('.kernel')}.lora_{matrix}" for kernel in kernels)
    return Rule(owners, (f"{PREFIX}{name}.lora_{matrix.upper()}",), packing)


def has_adapters(plan: Plan) -> bool:
    """Returns whether the model of a plan has adapters."""
    config = getattr(plan.module, "config", None)
    return isinstance(config, ADAPTED) and config.lora.lora_rank is not None


def merge_plan(plan: Plan) -> Plan:
    """Returns the import of the same model with its adapters merged into the weights.

    Each sum is computed in float64, and rounded once.
    """
    lora = plan.module.config.lora
    scale = lora.lora_alpha / lora.lora_rank
    config = plan.module.config.replace(lora_rank=None)

    def merge(owner: str) -> np.ndarray:
        kernel = plan.tensors[f"{owner}.kernel"]
        parts = {
            name: plan.tensors[name].read().astype(np.float64)
            for name in (f"{owner}.{part}kernel" for part in ("", "lora_a.", "lora_b."))
        }
        (merged,) = merge_adapters(parts, scale).values()  # type: ignore[arg-type]
        return np.asarray(merged).astype(kernel.dtype)

    tensors = {name: tensor for name, tensor in plan.tensors.items() if not is_adapter(name)}
    for name in plan.tensors:
        owner, found, _ = name.partition(".lora_a.")
        if found:
            kernel = tensors[f"{owner}.kernel"]
            read = functools.partial(merge, owner)
            tensors[f"{owner}.kernel"] = StoredTensor(kernel.shape, kernel.dtype, read)
    return dataclasses.replace(
        plan,
        module=abstract_model(config),
        links=[each for each in plan.links if not is_adapter(each.target[0])],
        tensors=tensors,
    )


def plan_adapter(plan: Plan, exported: Plan) -> Plan:
    """Plans how the adapters of a model are written as PEFT has them.

    Args:
        plan: the import of the model with its adapters.
        exported: the export of the merged model under the names of Hugging Face.

    Raises:
        UsageError: some adapt what is one array of several layers there.
    """
    adapters = {name: t for name, t in plan.tensors.items() if is_adapter(name)}
    adapted = {_kernel(name) for name in adapters}
    layers = {
        name: each
        for name, each in _linear_modules(exported).items()
        if adapted.intersection(each.target)
    }
    is_shared = all(_have_one_matrix(each, adapters) for each in layers.values())
    rules = _rules(layers) if is_shared else _stacked_rules(layers, adapted)
    links, unmatched = link(rules, {name: tensor.shape for name, tensor in adapters.items()})
    if unmatched:
        owners = sorted({name.split(".lora_")[0] for name in unmatched})
        raise UsageError(
            f"unsupported: {exported.origin.dialect.name} has no module for each of these layers, "
            f"which PEFT could adapt: {', '.join(owners[:4])}; ",
            Setting("format", flag="to", value="hf"),
            " merges them",
        )
    tensors = export_tensors(links, adapters)
    return dataclasses.replace(exported, module=plan.module, links=links, tensors=tensors)


def _kernel(name: str) -> str:
    """Returns the kernel that a parameter of an adapter changes."""
    return f"{name.split('.lora_')[0]}.kernel"


def _have_one_matrix(each: Link, adapters: Mapping[str, StoredTensor]) -> bool:
    """Returns whether the adapters of a module's layers begin with the same matrix."""
    names = [f"{kernel.removesuffix('.kernel')}.lora_a.kernel" for kernel in each.target]
    if not all(name in adapters for name in names):
        return False
    first, *others = (adapters[name].read().tobytes() for name in names)
    return all(other == first for other in others)


def adapter_settings(plan: Plan, base: str | None) -> dict[str, Any]:
    """Returns ``adapter_config.json`` of a plan of ``plan_adapter``."""
    lora = plan.module.config.lora
    # What comes after the block's index: PEFT compares the ends of names.
    modules = [name.removeprefix(PREFIX).split(".lora_")[0] for name in plan.tensors]
    ends = {name.split(".")[-2] + "." + name.split(".")[-1] for name in modules}
    # Where adapters of several layers are one, all have a multiple of their rank.
    rank = next(t.shape[0] for name, t in plan.tensors.items() if name.endswith("lora_A.weight"))
    rules = plan.module_mapping.rules_for(plan.module)
    is_pair = isinstance(plan.module.config, EncoderDecoderConfig)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM" if is_pair else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": lora.lora_alpha * rank / lora.lora_rank,
        "lora_dropout": lora.lora_dropout,
        "target_modules": sorted(ends),
        # Of matrices (in, out), as GPT-2's are.
        "fan_in_fan_out": not all(rule.transpose for rule in rules),
        "bias": "none",
        "inference_mode": True,
    }
