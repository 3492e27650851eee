"""The declaration of a dialect: the classes, arrays and settings of one code base.

A ``StateDictAdapter`` is a code base. It has a ``ModuleMapping`` for every class to be ported,
which may have a ``Buffer`` for arrays that are not parameters. As in ``rules``, *target* is the
jaxformer side and *source* the other code base.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

from jaxformer.porting.mapping.packings import Shape
from jaxformer.porting.mapping.rules import Rules
from jaxformer.porting.mapping.source_model import SourceModel


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A source array that is not a parameter: a mask, sinusoids, rotary tables.

    jaxformer computes it. On import it must hold the computed values; on export the computed values
    are written, or the imported bits where they are known.

    Attributes:
        source: its name; ``*`` is a list index.
        values: returns the computed values from the target module and the stored shape (None on
            export); None where the module has no such buffer.
        written: whether it is exported; False where only old checkpoints have it.
        install: gives the target module the imported bits, where rounding makes them differ from
            the computed ones: a table of positions.
        rounding: a relative error of the stored values beyond that of their dtype, where the
            source has rounded them to a narrower one before.
    """

    source: str
    values: Callable[[Any, Shape | None], np.ndarray | None]
    written: bool = True
    install: Callable[[Any, np.ndarray], None] | None = None
    rounding: float = 0.0

    def matches(self, name: str) -> bool:
        """Whether the array by this name is one of these buffers."""
        return re.fullmatch(re.escape(self.source).replace(r"\*", r"\d+"), name) is not None

    def differs(self, stored: np.ndarray, module: Any) -> str | None:
        """Returns how the stored values differ from the computed ones, or None where they agree.

        Tables of sines and cosines are float32 functions of position · frequency, whose last bits
        depend on the library: an angle is right to a few units in the last place, so an entry may
        be off by 2 · eps · (1 + position), where positions run along the last dimension but one.
        """
        expected = self.values(module, stored.shape)
        if expected is None:
            return "does not belong to this model"
        if expected.shape != stored.shape:
            return f"has shape {stored.shape}, not {expected.shape}"
        if stored.dtype.kind in "biu":
            same = bool((stored == expected.astype(stored.dtype)).all())
            return None if same else "does not hold the computed values"
        eps = 2.0**-22 + self.rounding + float(ml_dtypes.finfo(stored.dtype).eps)
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
        return f"differs by {np.nanmax(distance):.3g} from the computed values"


@dataclasses.dataclass(frozen=True)
class ConfigReader:
    """Reads the config of a target from source settings.

    Attributes:
        read: returns a config of jaxformer.
    """

    read: Callable[[SourceModel], Any]


@dataclasses.dataclass(frozen=True)
class ModuleMapping:
    """Source classes and the jaxformer class that computes the same.

    Attributes:
        source: names of the source classes; export goes to the first.
        target: the jaxformer class that ``build`` makes.
        build: makes the target module from source settings, called without drawing weights; or
            reads the settings of a target that has a config.
        rules: which arrays are the same, or a function of the target module that returns that.
        aliases: second source names of an array, by its first name: a tied head. Either may be
            missing on import; both are exported.
        buffers: source arrays that are not parameters.
        prefix: the start of names in a whole model, which some files leave out.
        outside: the starts of names that never have the prefix.
        settings: returns, from a target module, the source settings that ``build`` needs.
        published: the rules of the arrays in files, where they are not laid out as in the class;
            either is read, and folders are written by these.
        superfluous: patterns of names that published files have and the class has not: they are
            left out, as transformers does.
        translated: attributes of the target that ``build`` need not reproduce, because the rules
            make up for them.
    """

    source: tuple[str, ...]
    target: type
    build: Callable[[SourceModel, nnx.Rngs], Any] | ConfigReader
    rules: Rules | Callable[[Any], Rules]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    buffers: tuple[Buffer, ...] = ()
    prefix: str = ""
    outside: tuple[str, ...] = ()
    settings: Callable[[Any], dict[str, Any]] = lambda module: {}
    translated: frozenset[str] = frozenset()
    superfluous: tuple[str, ...] = ()
    published: Callable[[Any], Rules] | None = None

    def as_published(self) -> "ModuleMapping":
        """Returns the mapping of the same classes to arrays as they lie in files."""
        return self if self.published is None else dataclasses.replace(self, rules=self.published)

    def rules_for(self, module: Any) -> Rules:
        """Returns the rules for one target module."""
        return self.rules if isinstance(self.rules, tuple) else self.rules(module)


@dataclasses.dataclass(frozen=True)
class StateDictAdapter:
    """All that is declared of one code base; the command line calls it a dialect.

    Attributes:
        name: the dialect's name on the command line and in certificates.
        module_mappings: its classes; where several fit, the first is taken.
        prefix: the start of names in its whole models; mappings without a prefix go without it.
        model_types: its ``model_type`` in config.json; empty where it is not of Hugging Face.
        old_names: replacements in the names of older files, by regular expression.
        published_names: replacements in the names of what is written as a folder, by regular
            expression, where the class has other names than all versions of transformers read.
        untied_names: second names of an array that a folder has too, because some version of
            transformers does not tie them.
        head_names: those of a tied head's matrix that a folder has too where its config says that
            the head is not tied.
        equivalents: classes of a config.json whose files another class reads, by that class.
        overlooks: returns the settings of a config that no row of its table reads.
    """

    name: str
    module_mappings: tuple[ModuleMapping, ...]
    prefix: str = ""
    model_types: tuple[str, ...] = ()
    old_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    published_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    untied_names: frozenset[str] = frozenset()
    head_names: frozenset[str] = frozenset()
    equivalents: Mapping[str, str] = dataclasses.field(default_factory=dict)
    overlooks: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: dict(config)

    def published(self, name: str) -> str:
        """Returns the name that an array has in a folder."""
        for pattern, new in self.published_names.items():
            name = re.sub(pattern, new, name)
        return name

    def classes(self) -> list[str]:
        """Returns the names of all its classes."""
        return [name for module_mapping in self.module_mappings for name in module_mapping.source]

    def for_class(self, kinds: Iterable[str]) -> ModuleMapping | None:
        """Returns the mapping of the first of these class names that has one."""
        for kind in kinds:
            for module_mapping in self.module_mappings:
                if kind in module_mapping.source:
                    return module_mapping
        return None

    def for_module(self, module: Any) -> list[ModuleMapping]:
        """Returns the mappings that a target module may be exported by, the best first."""
        exact = [c for c in self.module_mappings if c.target is type(module)]
        return exact + [
            c for c in self.module_mappings if c not in exact and isinstance(module, c.target)
        ]
