"""The table of model types: what their models are built of, and what the proofs have measured."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flax import nnx

from jaxformer.encoder_decoder_classifier import EncoderDecoderClassifier
from jaxformer.porting.dialects import HUGGING_FACE, find_dialect
from jaxformer.porting.dialects.multimodal import MULTIMODAL
from jaxformer.transformer_classifier import TransformerClassifier
from tests.support.hugging_face.cases import ALL_CASES
from tests.support.hugging_face.proof import FIGURES, Proof

ROOT = Path(__file__).parents[3]
MEASURES = ROOT / "docs/reference/models.json"
PAGE = ROOT / "docs/reference/models.md"
DECLARED = ROOT / "jaxformer/porting/model_types.json"
# What the page has a row of.
MODEL_TYPES = (*HUGGING_FACE, *MULTIMODAL)
FILES = (
    "positions", "disentangled", "latent_attention", "patches", "pooling", "norms", "blocks",
    "feed_forward", "experts", "heads",
)  # fmt: skip
# How much larger and smaller a difference may be when it is measured again: the last digits of
# rounding differ between machines and compilations.
LARGER, SMALLER = 10.0, 100.0
HEAD = """\
# Model types

These are the model types of Hugging Face that jaxformer reads and writes: weights, settings and
what lies beside them. `jaxformer port --list` prints the list. Of the last three, which see, the
language model alone is read, and becomes a model of its own type.

Each type is tried with several configurations of random weights: heads that do not divide the
width, tied and untied heads, windows shorter than the text, texts of 303 tokens, padded to the left
and to the right. Every configuration passes this proof:

- *float64*: logits and the hidden states of every layer, jaxformer against transformers, with
  everything in float64, the tables of positions too. Each side computes its own tables.
- *tables as they are*: the same, but the tables of positions are rounded to float32, as both sides
  do in real use. Their last bits differ from library to library.
- *gradients*: of every parameter, in float64.
- *greedy tokens*: how many tokens of text, made with a cache, are the same.
- The weights come back bit for bit in four dtypes; a folder goes through `jaxformer port` and
  comes back with the same bytes and settings; `jaxformer verify` finds no difference, and finds one
  wrong setting.

Of every type that reads texts with one stack of blocks, the classes for tasks are ported too, as
far as transformers has them: `*ForSequenceClassification`, `*ForTokenClassification`,
`*ForQuestionAnswering` and `*ForMultipleChoice` become a `TransformerClassifier`, with the names of
their labels; of BART, mBART and T5's kin those of texts and questions become an
`EncoderDecoderClassifier`. Scores and gradients of all of them are compared in float64
(`tests/porting/test_task_heads.py`). `CLIPForImageClassification` and its like of SigLIP become a
`VisionTransformer`; what makes the vector of an image has no effect there, and is kept.
`WhisperForAudioClassification` becomes a `SpeechClassifier`.

Random settings, drawn from those that each class of transformers really has, make no difference
either: 405 configurations are drawn anew in every run of the slow tier.

Differences are the largest of all configurations, relative to the largest number that is compared.
`python docs/write_models.py` measures all of it and writes this page.

| model type | classes | parts | float64 | tables as they are | gradients | greedy tokens | notes |
|---|---|---|---|---|---|---|---|
"""


def measure(name: str) -> dict[str, float]:
    """Returns all that the proof of a case measures."""
    proof = Proof(name)
    found = proof.outputs_and_gradients()
    more = proof.without_mask()
    found |= more | {"outputs": max(found["outputs"], more["outputs"])}
    found["tokens"] = 0
    if proof.case.makes_text:
        candidate, reference = proof.texts()
        found["tokens"] = int((candidate == reference).all() and candidate.shape[1])
    return found


def saved_measures() -> dict[str, dict[str, float]]:
    """Returns what tests have saved, by case: the largest of each; empty without a folder."""
    found: dict[str, dict[str, float]] = {}
    for path in Path(os.environ[FIGURES]).glob("models.*") if FIGURES in os.environ else ():
        for line in path.read_text(encoding="utf-8").splitlines():
            figures = json.loads(line)
            known = found.setdefault(figures.pop("case"), {})
            for name, value in figures.items():
                known[name] = max(value, known.get(name, 0.0))
    for name, known in found.items():
        if not ALL_CASES[name].makes_text:
            known["tokens"] = 0
    return found


def read_measures() -> dict[str, dict[str, float]]:
    """Returns what docs/reference/models.json holds, by case."""
    return json.loads(MEASURES.read_text(encoding="utf-8")) if MEASURES.exists() else {}


def holds(stated: dict[str, float] | None, measured: dict[str, float]) -> bool:
    """Whether stated measures are of the size of those that a new run has made."""
    return stated is not None and all(
        stated[name] == value
        if name == "tokens"
        else stated[name] / SMALLER <= max(value, 1e-17) <= max(stated[name], 1e-16) * LARGER
        for name, value in measured.items()
    )


def parts_of(module: nnx.Module) -> list[str]:
    """Returns the names of the parts of the mirror that a model is built of, the outer first."""
    found = [type(part) for _, part in nnx.iter_graph(module) if isinstance(part, nnx.Module)]
    names = [c.__name__ for f in FILES for c in found if c.__module__ == f"jaxformer.{f}"]
    # The lack of something is no part; what a mixture of experts is built of is named by it.
    unnamed = ("NoPositions", "NoNorm", "Router", "ExpertWeights")
    return [name for name in dict.fromkeys(names) if name not in unnamed]


def declared(dialect: str, parts: Iterable[str]) -> dict[str, Any]:
    """Returns the entry of a model type in jaxformer/porting/model_types.json."""
    cases = [case for case in ALL_CASES.values() if case.dialect == dialect]
    text = MULTIMODAL.get(dialect)
    # Those for tasks, which every type may have, are described in the text above the table.
    mappings = () if text else find_dialect(dialect).module_mappings
    tasks = (TransformerClassifier, EncoderDecoderClassifier)
    classes = [n for m in mappings if m.target not in tasks for n in m.source]
    return {
        "classes": classes if text is None else [cases[0].kind],
        "generates": any(case.makes_text for case in cases),
        "parts": list(parts),
        **({} if text is None else {"text_part": text}),
    }


def parts_of_dialect(dialect: str) -> list[str]:
    """Returns the parts of all cases of a model type."""
    cases = [name for name, case in ALL_CASES.items() if case.dialect == dialect]
    return list(dict.fromkeys(p for name in cases for p in parts_of(Proof(name).target)))


def page(measures: dict[str, dict[str, float]], types: dict[str, Any]) -> str:
    """Returns docs/reference/models.md."""
    return HEAD + "".join(_row(name, measures, types[name]) for name in MODEL_TYPES)


def _row(dialect: str, measures: dict[str, dict[str, float]], known: dict[str, Any]) -> str:
    cases = {name: case for name, case in ALL_CASES.items() if case.dialect == dialect}

    def worst(*figures: str) -> str:
        value = max(measures[name][figure] for name in cases for figure in figures)
        return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")

    tokens = {int(measures[name]["tokens"]) for name, case in cases.items() if case.makes_text}
    notes = dict.fromkeys(case.notes for case in cases.values() if case.notes)
    if known.get("text_part"):
        notes["the language model alone; what sees is left out by `--ignore`"] = None
    cells = [
        f"`{dialect}`",
        ", ".join(f"`{name}`" for name in known["classes"]),
        ", ".join(known["parts"]),
        worst("outputs", "states"),
        worst("as_it_is"),
        worst("gradients"),
        str(min(tokens)) if tokens else "",
        "; ".join(notes),
    ]
    return f"| {' | '.join(cells)} |\n"


def as_json(entries: dict[str, Any]) -> str:
    """Returns JSON with one entry a line, so that two people's entries do not conflict."""
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def out_of_date() -> list[str]:
    """Returns what docs/reference/models.md and its tables do not say, or say wrongly.

    What tests have saved is compared with what is stated.
    """
    known = read_measures()
    stale = [f"no measures of {name}" for name in ALL_CASES.keys() - known.keys()]
    stale += [f"there is no case {name}" for name in known.keys() - ALL_CASES.keys()]
    types = json.loads(DECLARED.read_text(encoding="utf-8"))
    stale += [f"the declaration of {name}" for name in set(MODEL_TYPES) ^ types.keys()]
    if stale:
        return stale
    stale = [f"{n}: {m}" for n, m in saved_measures().items() if not holds(known[n], m)]
    for name, entry in types.items():
        if declared(name, entry["parts"]) != entry:
            stale.append(f"the declaration of {name}")
    if PAGE.read_text(encoding="utf-8") != page(known, types):
        stale.append(PAGE.name)
    return stale
