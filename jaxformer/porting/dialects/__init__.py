"""Dialects: one file a family, which declares how a code base's models become jaxformer's and back.

A file's ``DIALECTS`` are ``StateDictAdapter``s: tables of rules (names and layouts of arrays, see
``mapping.rules``) and of settings (``mapping.settings``), both read in either direction. What
families share is in ``common``. The families of Hugging Face are read from a config.json, the
others from the attributes of PyTorch modules or the shapes of arrays.

``find_dialect`` returns one by its name on the command line; ``detect_dialect`` finds it from a
config, a module or the names of arrays; ``choose_dialect`` does the one or the other, and rejects a
name that contradicts the config.
"""

import contextlib
import functools
import importlib
from collections.abc import Mapping
from typing import Any

from jaxformer.errors import JaxformerError, Setting, UsageError
from jaxformer.porting.dialects.common.transformers_types import TRANSFORMERS_TYPES
from jaxformer.porting.dialects.multimodal import MULTIMODAL
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.adapter import StateDictAdapter

# The name of every dialect, and the file that declares it. Hugging Face's are named by model_type.
HUGGING_FACE = {name: known.file for name, known in TRANSFORMERS_TYPES.items()}
DIALECTS = {
    "jaxformer": "jaxformer",
    "torch_ref": "torch_ref",
    "prepost": "prepost",
    "encdec": "encdec",
    "charlm": "charlm",
    "unified": "unified",
    "minimal": "minimal",
    "torch.nn": "torch_nn",
    "nanogpt": "nanogpt",
    **HUGGING_FACE,
}


class UnknownDialectError(UsageError):
    """Arrays that are of no known code base."""


@functools.cache
def find_dialect(name: str) -> StateDictAdapter:
    """Returns the dialect of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in DIALECTS:
        raise UsageError(f"there is no dialect {name}: choose among {', '.join(DIALECTS)}")
    module = importlib.import_module(f"{__name__}.{DIALECTS[name]}")
    dialects: dict[str, StateDictAdapter] = {d.name: d for d in module.DIALECTS}
    return dialects[name]


def detect_dialect(
    tensors: Mapping[str, StoredTensor], *, config: Any = None, module: Any = None
) -> StateDictAdapter:
    """Returns the dialect of a config, a PyTorch module or the names of arrays.

    A config of Hugging Face has a ``model_type``; a class of transformers, PyTorch or torch_ref is
    defined there. Otherwise every dialect is tried, by the names and shapes of the arrays; no array
    is read.

    Args:
        tensors: arrays by name.
        config: as ``from_torch`` takes it.
        module: the PyTorch module, where there is one.

    Raises:
        UnknownDialectError: no dialect fits; the message says how to name one.
        UsageError: several do, likewise.
    """
    settings = _settings(config)
    if "auto_map" in settings:
        raise UsageError(
            "the config names code of its own to run (auto_map), and there is no such feature: "
            f"name one of {', '.join(HUGGING_FACE)} as dialect to read the arrays without it"
        )
    packages = _packages(module)
    model_type = _model_type(config, module)
    if model_type is not None:
        if model_type not in HUGGING_FACE:
            unknown = _describe_unknown(str(model_type), settings)
            known = ", ".join((*HUGGING_FACE, *MULTIMODAL))
            raise UsageError(f"model_type {model_type!r} is not known{unknown}; known are {known}")
        return find_dialect(model_type)
    if module is not None and type(module).__module__.startswith("torch.nn."):
        return find_dialect("torch.nn")
    if "torch_ref" in packages:
        return find_dialect("torch_ref")
    return _find_by_arrays(tensors, config, module)


def choose_dialect(
    tensors: Mapping[str, StoredTensor],
    name: str | None = None,
    *,
    config: Any = None,
    module: Any = None,
    force: bool = False,
) -> StateDictAdapter:
    """Returns the dialect of that name, or the one that ``detect_dialect`` finds.

    Args:
        tensors: arrays by name.
        name: None to detect it.
        config: as ``from_torch`` takes it.
        module: the PyTorch module, where there is one.
        force: whether the name may contradict the config.

    Raises:
        UsageError: there is no such dialect, or the config is of another; what ``detect_dialect``
            raises.
    """
    method = _settings(config).get("quantization_config")
    if method is not None:
        kind = method.get("quant_method") if isinstance(method, Mapping) else method
        raise UsageError(
            f"the config has a quantization_config ({kind}), and quantised weights are not "
            "supported: take the model before it was quantised"
        )
    if name is None:
        return detect_dialect(tensors, config=config, module=module)
    dialect = find_dialect(name)
    if not dialect.model_types or force:
        return dialect
    model_type = _model_type(config, module)
    classes = _settings(config).get("architectures")
    differs = []
    if model_type is not None and model_type not in dialect.model_types:
        differs.append(f"its model_type is {model_type!r}, not {dialect.model_types[0]!r}")
    # A class of the same model_type may have another head, which the arrays show.
    elif model_type is None and isinstance(classes, list) and classes:
        known = dialect.classes()
        if not set(map(str, classes)) & set(known):
            differs.append(f"its architectures are {classes}, not {' or '.join(known)}")
    if differs:
        raise UsageError(
            f"the dialect {name} contradicts the config, {' and '.join(differs)}: leave it out, or "
            "take the risk of wrong numbers with ",
            Setting("force"),
        )
    return dialect


def check_class(
    dialect: StateDictAdapter, tensors: Mapping[str, StoredTensor], config: Any
) -> None:
    """Checks that a dialect has the class that a config.json names, if it names one.

    Raises:
        UsageError: it has not: the class is for another task.
    """
    classes = _settings(config).get("architectures")
    if not dialect.model_types or not isinstance(classes, list) or not classes:
        return
    known = {*dialect.classes(), *dialect.equivalents}
    if known & set(map(str, classes)):
        return
    starts = (dialect.prefix, *(s for m in dialect.module_mappings for s in m.outside))
    heads = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in tensors)
    inside = {f"{name.partition('.')[0]}.*" for name in tensors if name.startswith(starts)}
    others = [pattern for pattern in heads if pattern not in inside]
    has_body = bool(inside) and bool(others)
    raise UsageError(
        f"unsupported: the class {classes[0]}; {dialect.name} has {', '.join(dialect.classes())}",
        *(
            (f": leave out its head ({', '.join(others[:5])}) with ", Setting("ignore"))
            if has_body
            else ()
        ),
    )


def _settings(config: Any) -> Mapping[str, Any]:
    """Returns a source config, or nothing where the config is of another kind."""
    return config if isinstance(config, Mapping) else {}


def _describe_unknown(model_type: str, settings: Mapping[str, Any]) -> str:
    """Returns what is missing for an unknown model type, and which known one is nearest."""
    # Not at the head of the file: the command line lists the dialects without importing JAX.
    from jaxformer.porting.dialects.unknown_types import describe_unknown

    overlooked = {}
    for name in HUGGING_FACE:
        # One that rejects a setting is not near.
        with contextlib.suppress(
            JaxformerError, ArithmeticError, LookupError, TypeError, ValueError
        ):
            overlooked[name] = find_dialect(name).overlooks(settings)
    return describe_unknown(model_type, settings, HUGGING_FACE, overlooked)


def _packages(module: Any) -> list[str]:
    """Returns the packages that define a module's class and its bases."""
    return [] if module is None else [c.__module__.partition(".")[0] for c in type(module).__mro__]


def _model_type(config: Any, module: Any) -> Any:
    """Returns the ``model_type`` of a config, or that of a module of transformers."""
    found = _settings(config).get("model_type")
    if found is None and "transformers" in _packages(module):
        found = getattr(getattr(module, "config", None), "model_type", None)
    return found


def _find_by_arrays(
    tensors: Mapping[str, StoredTensor], config: Any, module: Any
) -> StateDictAdapter:
    """Returns the one dialect that has these names and shapes."""
    # Not at the head of the file: the command line lists the dialects without importing JAX.
    from jaxformer.porting.mapping.matching import match_arrays

    kinds = [] if module is None else [c.__name__ for c in type(module).__mro__]

    def fits(name: str) -> bool:
        try:
            match_arrays(tensors, find_dialect(name), kinds=kinds, module=module, config=config)
        except JaxformerError:
            return False
        return True

    names = DIALECTS if tensors else ()
    # A model of Hugging Face has a config.json that names its type: those come last.
    fitting = [find_dialect(n) for n in names if n not in HUGGING_FACE and fits(n)]
    fitting = fitting or [find_dialect(n) for n in names if n in HUGGING_FACE and fits(n)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        found = ", ".join(dialect.name for dialect in fitting)
        raise UsageError(f"the arrays may be of {found}: say which with ", Setting("dialect"))
    what = f"the first is called {next(iter(tensors))!r}" if tensors else "there are none"
    raise UnknownDialectError(
        f"no dialect has these arrays with these settings ({what}): name one with ",
        Setting("dialect"),
        " to see what it lacks, and give its settings with ",
        Setting("config"),
        f". There are {', '.join(DIALECTS)}",
    )
