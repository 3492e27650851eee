"""Adapters in PEFT's folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT names an adapter by the module of the base model that it adapts, so a folder is read and
written beside the port of the base model, whose rules say which module is which.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jaxformer.adapters import is_adapter, merge_adapters
from jaxformer.config import TransformerLMConfig
from jaxformer.config_parts import LINEAR_LAYERS
from jaxformer.errors import CheckpointError, UsageError
from jaxformer.porting.formats.raw_checkpoints import read_config
from jaxformer.porting.formats.safetensors_files import read_safetensors
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import parameter_shapes
from jaxformer.porting.mapping.packings import ONE_TO_ONE
from jaxformer.porting.mapping.plans import Plan
from jaxformer.porting.mapping.rules import Rules, link, names
from jaxformer.porting.mapping.transfer import export_tensors, import_tensors
from jaxformer.transformer_lm import TransformerLM

SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# What stands before the names of the base model's modules.
PREFIX = "base_model.model."
# Settings of PEFT with which an adapter computes something else; their values are without effect.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "use_rslora": (False, None),
    "use_dora": (False, None), "use_qalora": (False, None), "lora_bias": (False, None),
    "modules_to_save": (None, []), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []), "layer_replication": (None, []),
    "target_parameters": (None, []), "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
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
            "here: name its base model with --base"
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
        f"{name}={settings[name]!r:.60}"
        for name, usual in WITHOUT_EFFECT.items()
        if name in settings and settings[name] not in usual
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
    if not isinstance(config, TransformerLMConfig):
        raise UsageError(f"adapters go with a language model, and this is a {plan.origin.kind}")
    owners = _adapted(plan, adapter)
    wanted = {owner.rpartition(".")[2] for owner in owners.values()}
    try:
        config = config.replace(
            lora_rank=adapter.settings.get("r"),
            lora_alpha=float(adapter.settings.get("lora_alpha", 8)),
            lora_dropout=float(adapter.settings.get("lora_dropout") or 0.0),
            lora_targets=",".join(name for name in LINEAR_LAYERS if name in wanted),
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"{adapter.path / SETTINGS}: {error}") from error
    module = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    shapes = {name: s for name, s in parameter_shapes(module).items() if is_adapter(name)}
    rules = _rules({owner: name for name, owner in owners.items()})
    links, unmatched = link(rules, shapes)
    problems = [f"no array for {name}" for name in unmatched]
    for each in links:
        (name,), (shape,) = each.source, each.source_shapes
        found = adapter.tensors.get(name)
        if found is None:
            problems.append(f"no {name}")
        elif found.shape != shape:
            problems.append(f"{name} has shape {found.shape}, not {shape}")
    if problems:
        raise CheckpointError(f"{adapter.path} does not fit its model: {'; '.join(problems)}")
    tensors = plan.tensors | import_tensors(links, adapter.tensors)
    return dataclasses.replace(plan, module=module, links=[*plan.links, *links], tensors=tensors)


def _adapted(plan: Plan, adapter: Adapter) -> dict[str, str]:
    """Returns jaxformer's module for each module of the base model that has an adapter."""
    known = _linear_modules(plan)
    found, unknown = {}, []
    for key in adapter.tensors:
        name, matrix, _ = key.removeprefix(PREFIX).rpartition(".lora_A.weight")
        if not matrix:
            if not key.endswith(".lora_B.weight"):
                unknown.append(key)
            continue
        # A file of weights may leave out the name of the model around the blocks.
        same = [k for k in known if k == name or name.endswith(f".{k}") or k.endswith(f".{name}")]
        if len(same) != 1:
            unknown.append(key)
        else:
            found[name] = known[same[0]]
    if unknown:
        raise UsageError(
            f"{adapter.path} adapts what jaxformer's adapters do not, or what is one array of "
            f"several layers: {', '.join(unknown[:8])}"
        )
    return found


def _linear_modules(plan: Plan) -> dict[str, str]:
    """Returns jaxformer's linear layers of blocks, by the names of the modules of the source."""
    return {
        each.source[0].removesuffix(".weight"): each.target[0].removesuffix(".kernel")
        for each in plan.links
        if each.rule.packing is ONE_TO_ONE
        and each.target[0].endswith(".kernel")
        and each.target[0].split(".")[-2] in LINEAR_LAYERS
    }


def _rules(modules: Mapping[str, str]) -> Rules:
    """Returns the rules of adapters, from the base model's modules by jaxformer's."""
    return names(
        {
            f"{owner}.lora_{matrix}": f"{PREFIX}{name}.lora_{matrix.upper()}"
            for owner, name in modules.items()
            for matrix in ("a", "b")
        }
    )


def has_adapters(plan: Plan) -> bool:
    """Returns whether the model of a plan has adapters."""
    config = getattr(plan.module, "config", None)
    return isinstance(config, TransformerLMConfig) and config.lora.lora_rank is not None


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
        module=nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0))),
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
    modules = {owner: name for name, owner in _linear_modules(exported).items()}
    adapters = {name: t for name, t in plan.tensors.items() if is_adapter(name)}
    shapes = {name: tensor.shape for name, tensor in adapters.items()}
    links, unmatched = link(_rules(modules), shapes)
    if unmatched:
        layers = sorted({name.split(".lora_")[0] for name in unmatched})
        raise UsageError(
            f"unsupported: {exported.origin.dialect.name} has these layers in one array with "
            f"others, which PEFT adapts as one: {', '.join(layers[:4])}"
        )
    tensors = export_tensors(links, adapters)
    return dataclasses.replace(exported, module=plan.module, links=links, tensors=tensors)


def adapter_settings(plan: Plan, base: str | None) -> dict[str, Any]:
    """Returns ``adapter_config.json`` of a plan of ``plan_adapter``."""
    lora = plan.module.config.lora
    # What comes after the block's index: PEFT compares the ends of names.
    modules = [name.removeprefix(PREFIX).split(".lora_")[0] for name in plan.tensors]
    ends = {name.split(".")[-2] + "." + name.split(".")[-1] for name in modules}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.lora_rank,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": sorted(ends),
        "bias": "none",
        "inference_mode": True,
    }
