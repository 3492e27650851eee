"""Builds each line of docs/reference/families.md in three codes with equal weights."""

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from jaxformer.parameters import set_parameters, split
from jaxformer.porting import import_arrays
from jaxformer.positions import rotary_tables, sinusoidal_table
from parity_tests.harness import JAX, TORCH, Side

DOCUMENT = Path(__file__).parent.parent / "docs/reference/families.md"
FAMILIES = ("prepost", "encdec", "charlm", "unified", "minimal")
FILES = (
    "layers", "masks", "norms", "positions", "attention", "attention_core", "feed_forward",
    "blocks", "config", "transformer_lm", "encoder_decoder", "generation", "char_data",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A line of a table of docs/reference/families.md.

    Attributes:
        family: whose table it is in.
        reference: constructor and call in the family's code, or one expression for a function.
        candidate: the same in jaxformer's.
        place: which row of the family's table it is.
    """

    family: str
    reference: tuple[str, ...]
    candidate: tuple[str, ...]
    place: int

    @property
    def name(self) -> str:
        """The class or function of the family."""
        return self.reference[0].partition("(")[0].partition(".")[0]

    def __str__(self) -> str:
        return f"{self.family}-{self.place}-{self.name}"


def read_rows(text: str) -> Iterator[Row]:
    """Yields every line of every table.

    Raises:
        ValueError: a line is not two cells of one or two pieces of code, and a note.
    """
    family, place = "", 0
    for line in text.splitlines():
        if heading := re.match(r"## `(\w+)`", line):
            family, place = heading[1], 0
        if not line.startswith("|") or line in ("| family | jaxformer | note |", "|---|---|---|"):
            continue
        cells = line.strip("|").split(" | ")
        spans = [re.findall(r"`([^`]+)`", cell) for cell in cells[:2]]
        written = ["<br>".join(f"`{code}`" for code in codes) for codes in spans]
        if written != [cell.strip() for cell in cells[:2]] or len(spans[0]) != len(spans[1]):
            raise ValueError(f"not a line of code beside another: {line}")
        yield Row(family, tuple(spans[0]), tuple(spans[1]), place := place + 1)


ROWS = list(read_rows(DOCUMENT.read_text(encoding="utf-8")))


def family_module(family: str) -> ModuleType:
    """Returns the file that stands for the family's code."""
    return importlib.import_module(f"parity_tests.families.{family}")


def defined_in(module: ModuleType) -> dict[str, Any]:
    """Returns the public classes and functions of a file."""
    return {
        name: member
        for name, member in vars(module).items()
        if getattr(member, "__module__", None) == module.__name__ and not name.startswith("_")
    }


def vocabulary(side: Side) -> dict[str, Any]:
    """Returns jaxformer's public names, with the arguments that only JAX needs filled in."""
    filled = {"rngs": nnx.Rngs(0), "key": jax.random.key(0)} if side is JAX else {}
    names = {}
    for file in FILES:
        for name, member in defined_in(getattr(side, file)).items():
            make = member.__init__ if isinstance(member, type) else member
            given = {k: v for k, v in filled.items() if k in inspect.signature(make).parameters}
            names[name] = functools.partial(member, **given) if given else member
    return names


# Regular expressions in order, from the family's parameter names to torch_ref's.
KEYS = {
    "prepost": [
        (r"\bw_([qkvo])\b", r"\1_proj"),
        (r"\bff\.0\b", "feed_forward.up_proj"),
        (r"\bff\.2\b", "feed_forward.down_proj"),
        (r"\bnorm1\b", "attention_norm"),
        (r"\bnorm2\b", "feed_forward_norm"),
    ],
    "encdec": [
        (r"\bW_([qkvo])\b", r"\1_proj"),
        (r"\blinear1\b", "up_proj"),
        (r"\blinear2\b", "down_proj"),
        (r"\b(self_)?attn\b", "attention"),
        (r"\bcross_attn\b", "cross_attention"),
        (r"\bnorm1\b", "attention_norm"),
        (r"\bnorm2_of_3\b", "cross_attention_norm"),
        (r"\bnorm[23]\b", "feed_forward_norm"),
        (r"\blayers\b", "blocks"),
        (r"\bnorm\b", "final_norm"),
        (r"\bsrc_embedding\b", "source_embedding"),
        (r"\btgt_embedding\b", "target_embedding"),
        (r"\boutput_proj\b", "lm_head"),
        (r"\brelative_position_embedding\b", "position"),
        (r"^embedding\b", "0"),
    ],
    "charlm": [
        (r"\b([QKV])_weights\b", lambda match: f"{match[1].lower()}_proj"),
        (r"\bheads\.\d+\.", ""),
        (r"\bmulti_head\b", "attention"),
        (r"\blinear\b", "o_proj"),
        (r"\blayer_norm_1\b", "attention_norm"),
        (r"\blayer_norm_2\b", "feed_forward_norm"),
        (r"\blinear_layers\.0\b", "up_proj"),
        (r"\blinear_layers\.2\b", "down_proj"),
    ],
    "unified": [
        (r"\bW_([qkvo])\b", r"\1_proj"),
        (r"\bffn\b", "feed_forward"),
        (r"\bnet\.0\b", "up_proj"),
        (r"\bnet\.3\b", "down_proj"),
        (r"\bw_(gate|up|down)\b", r"\1_proj"),
        (r"\bnorm1\b", "attention_norm"),
        (r"\bnorm2\b", "feed_forward_norm"),
        (r"\blayers\b", "blocks"),
        (r"\btok_emb\b", "token_embedding"),
        (r"\bpos_enc\.pe\b", "position_embedding"),
        (r"^pe\.", ""),
    ],
    "minimal": [
        (r"\bw_([qkvo])\b", r"\1_proj"),
        (r"\blinear1\b", "up_proj"),
        (r"\blinear2\b", "down_proj"),
        (r"\bnorm1\b", "attention_norm"),
        (r"\bnorm2\b", "feed_forward_norm"),
    ],
}


def translate(family: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the family's arrays by torch_ref's names; separate heads are concatenated."""
    parts: dict[str, list[np.ndarray]] = {}
    for key, array in arrays.items():
        name = key
        if key.replace("norm2", "norm3") in arrays:
            name = name.replace("norm2", "norm2_of_3")
        for pattern, replacement in KEYS[family]:
            name = re.sub(pattern, replacement, name)
        parts.setdefault(name, []).append(array)
    assert family == "charlm" or all(len(part) == 1 for part in parts.values())
    return {name: np.concatenate(part) for name, part in parts.items()}


def numbers(tensors: Any) -> dict[str, np.ndarray]:
    """Returns named tensors as float64 arrays."""
    return {name: tensor.detach().double().numpy() for name, tensor in tensors}


class Subject:
    """A row built three times, with equal weights: the family's own code, JAX and torch_ref.

    Args:
        row: of the document.
        settings: the values of its constructors' free variables.
        perturb: standard deviation of what is added to the initial parameters.
    """

    def __init__(self, row: Row, settings: dict[str, Any], perturb: float = 0.1):
        self.row = row
        self.words = {"jax": vocabulary(JAX), "torch": vocabulary(TORCH)}
        torch.manual_seed(5)
        self.reference = eval(
            row.reference[0], {**defined_in(family_module(row.family)), **settings}
        )
        self.module = eval(row.candidate[0], {**self.words["jax"], **settings})
        self.twin = eval(row.candidate[0], {**self.words["torch"], **settings})
        self.is_module = isinstance(self.reference, torch.nn.Module)
        if not self.is_module:
            return
        if isinstance(self.module, tuple):
            self.module, self.twin = nnx.List(self.module), torch.nn.ModuleList(self.twin)
        random = np.random.default_rng(11)
        self.reference.double()
        with torch.no_grad():
            for parameter in self.reference.parameters():
                parameter += torch.from_numpy(perturb * random.standard_normal(parameter.shape))
        use_candidate_tables(self.reference)
        weights = translate(row.family, numbers(self.reference.named_parameters()))
        self.twin.double()
        tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
        self.twin.load_state_dict(tensors, strict=True)
        shapes = {name: p.shape for name, p in split(self.module)[1].items()}
        set_parameters(self.module, import_arrays(weights, shapes))

    def train(self, training: bool) -> None:
        """Sets the mode of all three."""
        self.reference.train(training)
        self.twin.train(training)
        (self.module.train if training else self.module.eval)()


def use_candidate_tables(reference: torch.nn.Module) -> None:
    """Replaces the family's position tables by jaxformer's, which are equal up to rounding.

    The two libraries' exp and pow differ in the last bit of a frequency, which grows with the
    position. With equal tables the comparison shows the mathematics.
    """
    for name, buffer in reference.named_buffers():
        leaf, (length, width) = name.rpartition(".")[2], buffer.shape[-2:]
        if leaf == "pe":
            table = sinusoidal_table(length, width)
        elif leaf in ("cos", "sin"):
            table = dict(zip(("cos", "sin"), rotary_tables(length, 2 * width), strict=True))[leaf]
        else:
            continue
        check_table(buffer.numpy(), table)
        buffer.copy_(torch.from_numpy(np.array(table)))


def check_table(reference: np.ndarray, candidate: np.ndarray) -> None:
    """Checks that tables are equal up to one float32 unit of an angle on each side."""
    positions = np.arange(len(candidate))[:, None]
    bound = 2 * np.finfo(np.float32).eps * (1 + positions)
    assert (np.abs(reference.reshape(candidate.shape) - candidate) <= bound).all()
