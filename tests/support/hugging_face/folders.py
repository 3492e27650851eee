"""Folders as transformers writes them, changed, and sent through ``jaxformer port`` and back."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from jaxformer.position_tables import yarn_attention_factor
from tests.support.hugging_face.building import build_case
from tests.support.hugging_face.case import Case
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.proof import Proof
from tests.support.ported import port

# What a config.json says of the file and not of the model.
NOT_THE_MODEL = {"_name_or_path", "transformers_version"}
# What transformers takes for settings of YaRN that are not there.
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


@dataclass(frozen=True)
class RoundTrip:
    """A folder that transformers has written, and what became of it.

    Attributes:
        source: the model of transformers, in float32.
        folder: as transformers has saved it.
        file: what ``port`` made of the folder, under jaxformer's names.
        back: the folder that ``port`` made of the file.
    """

    source: Any
    folder: Path
    file: Path
    back: Path


def round_trip(proof: Proof, folder: Path) -> RoundTrip:
    """Saves a model of transformers, and ports it there and back."""
    source = proof.source.float()
    trip = RoundTrip(source, folder / "first", folder / "ported.safetensors", folder / "back")
    source.save_pretrained(trip.folder)
    port(trip.folder, trip.file)
    port(trip.file, trip.back, "--as", proof.case.dialect, "--to", "hf")
    return trip


def load(case: Case, folder: Path) -> Any:
    """The model of a folder; every array has its place, and every place its array."""
    model, info = getattr(transformers, case.kind).from_pretrained(
        folder, output_loading_info=True, attn_implementation=case.attention, **case.arguments
    )
    assert not any(info.values()), info
    # As ``build`` does.
    model.config._experts_implementation = "eager"
    for parameter in model.parameters():
        # Mapped from the file, arrays begin at any address, which changes how some products round.
        parameter.data = parameter.data.clone()
    return model.eval()


def different_settings(
    source: Any, back: Any, without_effect: frozenset[str] = frozenset()
) -> dict[str, tuple[Any, Any]]:
    """The settings of two configs of transformers that are not equal: name, both values.

    Those that only the second has are left out: other versions of transformers read them.
    """
    before, after = (json.loads(config.to_json_string(use_diff=False)) for config in (source, back))
    for settings in (before, after):
        for part, _, name in (one.rpartition(".") for one in without_effect):
            settings.get(part, {}).pop(name, None)
        for part in (p for name, p in settings.items() if name in ("text_config", "vision_config")):
            for name in (*NOT_THE_MODEL, "dtype"):
                part.pop(name, None)
        rope = settings.get("rope_parameters") or {}
        for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
            if "rope_type" in parameters:
                # The older name of the same.
                parameters.pop("type", None)
            if parameters.get("rope_type") == "yarn":
                # A setting that is not there means the same as its default.
                parameters.update({**YARN_DEFAULTS, **parameters})
                scales = [parameters.get(name) for name in ("mscale", "mscale_all_dim")]
                if all(scales) and "attention_factor" not in parameters:
                    # Of the first that alone is made, the second stretches scores too.
                    one, other = (yarn_attention_factor(parameters["factor"], m) for m in scales)
                    parameters["attention_factor"] = one / other
                parameters.pop("mscale", None)
        if isinstance(inner := settings.get("attn_config"), dict):
            # MPT's is a config of its own, which says of the file what the outer one says.
            inner.pop("dtype", None)
    return {
        name: (value, after.get(name))
        for name, value in before.items()
        if name not in NOT_THE_MODEL | without_effect and value != after.get(name)
    }


def save_folder(path: Path, case: str = "llama", **changes: Any) -> Path:
    """Saves the model of a case in float32.

    Args:
        path: of the new folder.
        case: its name in ``CASES``.
        changes: of its config.json, afterwards; ... leaves a setting out.
    """
    build_case(CASES[case]).float().save_pretrained(path)
    change_config(path, **changes)
    return path


def change_config(path: Path, **changes: Any) -> dict[str, Any]:
    """Changes settings in a folder's config.json, and returns all; ... leaves a setting out."""
    file = path / "config.json"
    settings = {**json.loads(file.read_text()), **changes}
    settings = {name: value for name, value in settings.items() if value is not ...}
    file.write_text(json.dumps(settings))
    return settings
