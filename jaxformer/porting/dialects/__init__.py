"""Dialects: one file a family, which declares how a code base's models become jaxformer's and back.

A file's ``DIALECTS`` are ``StateDictAdapter``s: tables of rules (names and layouts of arrays, see
``mapping.rules``) and of settings (``mapping.settings``), both read in either direction. What
families share is in ``common``. The families of Hugging Face are read from a config.json, the
others from the attributes of PyTorch modules or the shapes of arrays.

``find_dialect`` returns one by its name on the command line; ``detect_dialect`` finds it from a
config, a module or the names of arrays.
"""

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from jaxformer.errors import JaxformerError, Setting, UsageError
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.adapter import StateDictAdapter

# The name of every dialect, and the file that declares it. Hugging Face's are named by model_type.
HUGGING_FACE = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gpt_neox": "gpt_neox",
    "bloom": "bloom",
    "bert": "bert",
    "phi": "phi",
    "opt": "opt",
}
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
        UsageError: no dialect fits, or several do; the message says how to name one.
    """
    settings = config if isinstance(config, Mapping) else {}
    if "auto_map" in settings:
        raise UsageError(
            "the config names code of its own to run (auto_map), and there is no such feature: "
            f"name one of {', '.join(HUGGING_FACE)} as dialect to read the arrays without it"
        )
    packages = (
        [] if module is None else [c.__module__.partition(".")[0] for c in type(module).__mro__]
    )
    model_type = settings.get("model_type")
    if "transformers" in packages:
        model_type = model_type or getattr(getattr(module, "config", None), "model_type", None)
    if model_type is not None:
        if model_type not in HUGGING_FACE:
            raise UsageError(
                f"model_type {model_type!r} is not known: {', '.join(HUGGING_FACE)} are"
            )
        return find_dialect(model_type)
    if module is not None and type(module).__module__.startswith("torch.nn."):
        return find_dialect("torch.nn")
    if "torch_ref" in packages:
        return find_dialect("torch_ref")
    return _find_by_arrays(tensors, config, module)


def _find_by_arrays(
    tensors: Mapping[str, StoredTensor], config: Any, module: Any
) -> StateDictAdapter:
    """Returns the one dialect that has these names and shapes."""
    # Not at the head of the file: the command line lists the dialects without importing JAX.
    from jaxformer.porting.mapping.matching import match_arrays

    kinds = [] if module is None else [c.__name__ for c in type(module).__mro__]
    fitting = []
    for dialect in map(find_dialect, DIALECTS if tensors else ()):
        try:
            match_arrays(tensors, dialect, kinds=kinds, module=module, config=config)
        except JaxformerError:
            continue
        fitting.append(dialect)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        found = ", ".join(dialect.name for dialect in fitting)
        raise UsageError(f"the arrays may be of {found}: say which with ", Setting("dialect"))
    what = f"the first is called {next(iter(tensors))!r}" if tensors else "there are none"
    raise UsageError(
        f"no dialect has these arrays with these settings ({what}): name one with ",
        Setting("dialect"),
        " to see what it lacks, and give its settings with ",
        Setting("config"),
        f". There are {', '.join(DIALECTS)}",
    )
