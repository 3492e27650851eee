"""The model to be imported, as a dialect reads it: the shapes of its arrays and its settings.

Settings come from the attributes of a PyTorch module or from a config (a Hugging Face config.json,
nanoGPT's ``model_args``, the arguments of a constructor), so that a dialect is declared once for
all of these. No torch is imported: a module is only read through its attributes.
"""

import copy
import difflib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from jaxformer.errors import CheckpointError, Setting, UsageError

Shape = tuple[int, ...]
REQUIRED = object()

# The names that constructors have for the same thing.
NUM_HEADS = ("num_heads", "n_heads", "heads", "n_head", "nhead", "heads_num", "h")
HEAD_DIM = ("head_dim", "d_k", "head_size", "d_head", "dim_head")
DROPOUT = ("dropout", "dropout_rate", "dropout_p", "p")
EPS = ("eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")


class MissingSettingError(UsageError):
    """A setting that neither the module nor the config has."""


class SourceModel:
    """One module of the source model.

    Args:
        shapes: of its arrays, buffers included, by name.
        kind: the name of its class, where known.
        module: the PyTorch module itself, where there is one.
        config: settings by name, which take precedence over those of the module.
        guess: whether the shape of a missing array is taken from the one with the most similar
            name, so that all that is missing can be listed.
        ignore: patterns of names; settings that have one need not be known.
        storages: of arrays, by name: those with the same one, other than None, are one array.

    Attributes:
        read: the names of the config's settings that somebody has asked for.
        defaults: what settings are that the config does not have.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        *,
        kind: str = "",
        module: Any = None,
        config: Mapping[str, Any] | None = None,
        guess: bool = False,
        ignore: Sequence[str] = (),
        storages: Mapping[str, Hashable] | None = None,
    ):
        self.guess = guess
        self.storages = dict(storages or {})
        self.ignore = tuple(ignore)
        self.read: set[str] = set()
        self.defaults: Mapping[str, Any] = {}
        self.shapes = dict(shapes)
        self.kind = kind
        self.module = module
        self.config = dict(config or {})

    def with_defaults(self, defaults: Mapping[str, Any]) -> "SourceModel":
        """Returns the same model, whose missing settings have these values."""
        model = copy.copy(self)
        model.defaults = defaults
        return model

    def setting(self, *names: str, default: Any = REQUIRED) -> Any:
        """Returns the first of the settings with these names that is not None.

        Raises:
            UsageError: there is none, and no default.
        """
        self.read.update(names)
        for name in names:
            value = self.config.get(name)
            value = getattr(self.module, name, None) if value is None else value
            if value is not None:
                return value
        if not any(name in self.config for name in names):
            default = next((self.defaults[n] for n in names if n in self.defaults), default)
        if default is REQUIRED:
            where = f"{self.kind or 'the model'} has no " + " or ".join(names)
            example = f'{{"{names[0]}": …}}'
            raise MissingSettingError(f"{where}: give it as ", Setting("config", example))
        return default

    def nullable(self, name: str, default: Any = None) -> Any:
        """Returns a setting of the config for which null is a value, or the default without one."""
        self.read.add(name)
        return self.config.get(name, self.defaults.get(name, default))

    def unread(self) -> dict[str, Any]:
        """Returns the config's settings that nobody has asked for, but null and ignored ones."""
        return {
            name: value
            for name, value in self.config.items()
            if name not in self.read
            and value is not None
            and not any(fnmatchcase(name, pattern) for pattern in self.ignore)
        }

    def number(self, *names: str) -> int | None:
        """Returns the first of the settings with these names that is an integer, or None."""
        values = (self.setting(name, default=None) for name in names)
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)

    def shape(self, name: str, axes: int | None = None) -> Shape:
        """Returns the shape of one of its arrays.

        Args:
            name: of the array.
            axes: the number of axes that it must have.

        Raises:
            CheckpointError: it is missing, or has another number of axes.
        """
        if name not in self.shapes and self.guess:
            fitting = [n for n, s in self.shapes.items() if axes is None or len(s) == axes]
            name = (difflib.get_close_matches(name, fitting, 1, 0.0) or [name])[0]
        if name not in self.shapes:
            raise CheckpointError(f"missing {name}, which the sizes of the model are read from")
        shape = self.shapes[name]
        if axes is not None and len(shape) != axes:
            raise CheckpointError(f"{name} has shape {shape}, where {axes} axes are needed")
        return shape

    def has(self, name: str) -> bool:
        """Whether there is an array of that name, or a module that has arrays."""
        return name in self.shapes or any(key.startswith(f"{name}.") for key in self.shapes)

    def child(self, path: str) -> "SourceModel":
        """Returns a submodule by its path."""
        module = self.module
        for part in path.split("."):
            module = getattr(module, part, None)
        start = f"{path}."
        child = SourceModel(
            {
                key[len(start) :]: shape
                for key, shape in self.shapes.items()
                if key.startswith(start)
            },
            kind=type(module).__name__ if module is not None else "",
            module=module,
            config=self.config,
            guess=self.guess,
            ignore=self.ignore,
        ).with_defaults(self.defaults)
        child.read = self.read
        return child

    def count(self, path: str) -> int:
        """Returns the number of modules in the list at ``path``."""
        start = f"{path}."
        return len(
            {key[len(start) :].partition(".")[0] for key in self.shapes if key.startswith(start)}
        )

    def children(self, path: str) -> Iterator["SourceModel"]:
        """Yields the modules of the list at ``path``."""
        return (self.child(f"{path}.{n}") for n in range(self.count(path)))

    def num_heads(self, width: int) -> int:
        """Returns the number of heads that share ``width`` features, from a setting."""
        heads, head_dim = self.number(*NUM_HEADS), self.number(*HEAD_DIM)
        if heads is None and head_dim is not None:
            heads = width // head_dim
        return int(self.setting(*NUM_HEADS)) if heads is None else heads

    def dropout(self) -> float:
        """Returns the one rate of dropout: of its own ``Dropout``, of those inside, or a setting.

        Raises:
            UsageError: it has several rates.
        """
        for name in DROPOUT:
            if isinstance(self.config.get(name), int | float):
                return float(self.config[name])
        if hasattr(self.module, "modules"):
            inside = list(self.module.modules())
            for modules in ([self.module, *self.module.children()], inside):
                rates = {m.p for m in modules if type(m).__name__ == "Dropout"}
                if len(rates) > 1:
                    listed = " and ".join(map(str, sorted(rates)))
                    raise UsageError(
                        f"unsupported: {self.kind} drops at the rates {listed}, not at one"
                    )
                if rates:
                    return float(rates.pop())
        rate = self.setting(*DROPOUT, default=0.0)
        return float(rate) if isinstance(rate, int | float) else 0.0

    def eps(self, path: str = "") -> float:
        """Returns what the norm at a path adds to the variance; PyTorch's default is 1e-5."""
        norm = self.child(path) if path else self
        return float(norm.setting(*EPS, default=1e-5))
