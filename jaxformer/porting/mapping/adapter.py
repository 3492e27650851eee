"""A dialect: what one code base calls its classes, arrays and settings, and what they are here."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

from jaxformer.porting.mapping.rules import Rules, Shape
from jaxformer.porting.mapping.source_model import SourceModel


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array of theirs that is no parameter: a mask, sinusoids, rotary tables.

    It is no part of our state. On reading it must hold what we would compute; on writing it is
    computed, unless the bits that were read are still at hand.

    Attributes:
        source: its name, ``*`` for an index.
        values: from our module and the stored shape (None on writing), what it must hold; None
            where the module has no such buffer.
        written: whether it is written; False where only old checkpoints have it.
        install: gives our module the bits that were read, where they are not quite those that we
            compute: a table of positions.
    """

    source: str
    values: Callable[[Any, Shape | None], np.ndarray | None]
    written: bool = True
    install: Callable[[Any, np.ndarray], None] | None = None

    def matches(self, name: str) -> bool:
        """Whether the array by this name is one of these buffers."""
        return re.fullmatch(re.escape(self.source).replace(r"\*", r"\d+"), name) is not None

    def differs(self, stored: np.ndarray, module: Any) -> str | None:
        """How the stored values part from those expected, or None where they agree.

        Tables of sines and cosines are float32 functions of position · frequency, whose last bits
        depend on the library: an angle is right to a few units in the last place, so an entry may
        be off by 2 · eps · (1 + position), where positions run along the last dimension but one.
        """
        expected = self.values(module, stored.shape)
        if expected is None:
            return "is not of this model"
        if expected.shape != stored.shape:
            return f"has shape {stored.shape}, not {expected.shape}"
        if stored.dtype.kind in "biu":
            same = bool((stored == expected.astype(stored.dtype)).all())
            return None if same else "does not hold what we would compute"
        eps = 2.0**-22 + float(ml_dtypes.finfo(stored.dtype).eps)
        position = np.arange(stored.shape[-2])[:, None] if stored.ndim > 1 else 0.0
        with np.errstate(invalid="ignore", over="ignore"):
            # As the file's dtype holds it: -1e9 is -inf in float16.
            expected = expected.astype(stored.dtype).astype(np.float64)
            distance = np.abs(stored.astype(np.float64) - expected)
            # Frequencies, which have one dimension, are small numbers of their own.
            scale = np.maximum(stored.ndim > 1, np.abs(expected))
            near = np.isfinite(expected) & (distance <= eps * (1 + position) * scale)
        if bool((near | (stored.astype(np.float64) == expected)).all()):
            return None
        return f"differs by {np.nanmax(distance):.3g} from what we would compute"


@dataclasses.dataclass(frozen=True)
class ModuleMapping:
    """Classes of theirs that are one thing, and what it is here.

    Attributes:
        source: their class names; the first is the one that is exported to.
        target: the class of ours that ``build`` makes.
        build: makes ours from their settings; called without drawing weights.
        rules: which arrays correspond, or a function of our module that says so.
        aliases: their names for an array that has another name as well, by that other name: a tied
            head. Either may be missing where it is read; both are written.
        buffers: their arrays that are no parameters.
        prefix: what stands before the names of a whole model, and is sometimes left out.
        outside: the beginnings of names that never have the prefix.
        settings: from our module, the settings that ``build`` would make it of.
        translated: attributes of ours that ``build`` need not give back, as the rules make up for
            them.
    """

    source: tuple[str, ...]
    target: type
    build: Callable[[SourceModel, nnx.Rngs], Any]
    rules: Rules | Callable[[Any], Rules]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    buffers: tuple[Buffer, ...] = ()
    prefix: str = ""
    outside: tuple[str, ...] = ()
    settings: Callable[[Any], dict[str, Any]] = lambda module: {}
    translated: frozenset[str] = frozenset()

    def rules_for(self, module: Any) -> Rules:
        """The rules for one module of ours."""
        return self.rules if isinstance(self.rules, tuple) else self.rules(module)


@dataclasses.dataclass(frozen=True)
class StateDictAdapter:
    """One code base.

    Attributes:
        name: as the command line calls it.
        counterparts: its classes; where several fit, the first is taken.
        prefix: of its whole models, which those of its classes that have none go without.
        model_types: what its config.json calls it; empty where it is not of Hugging Face.
        old_names: what older files say for parts of names: regular expression, replacement.
    """

    name: str
    module_mappings: tuple[ModuleMapping, ...]
    prefix: str = ""
    model_types: tuple[str, ...] = ()
    old_names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def classes(self) -> list[str]:
        """The names of all its classes."""
        return [name for module_mapping in self.module_mappings for name in module_mapping.source]

    def for_class(self, kinds: Iterable[str]) -> ModuleMapping | None:
        """The counterpart of the first of these class names that is known."""
        for kind in kinds:
            for module_mapping in self.module_mappings:
                if kind in module_mapping.source:
                    return module_mapping
        return None

    def for_module(self, module: Any) -> list[ModuleMapping]:
        """The counterparts that a module of ours may be exported as, the best first."""
        exact = [c for c in self.module_mappings if c.target is type(module)]
        return exact + [
            c for c in self.module_mappings if c not in exact and isinstance(module, c.target)
        ]
