"""Moves weights, optimizer state and settings between PyTorch and JAX.

A checkpoint of any format, a ``torch.nn.Module`` or a state dict enters. A plan pairs every array
of the source with arrays of the target, each exactly once, or the port is rejected with all
problems. What leaves is an NNX module, a state dict or a checkpoint, and a certificate of every
array. PyTorch need not be installed to port files.

- ``api``: ``from_torch`` and ``to_torch``, for modules in memory.
- ``arguments``: checks of what a program gives to public functions.
- ``checkpoint``: ``open_checkpoint``, for files and folders of any format; ``text_models``: those
  that must hold a whole model of texts.
- ``generation_settings``: what a folder says of writing text and nobody follows here.
- ``train_states``: training that starts from a checkpoint or changes the framework in mid-run.
- ``data``: what a run trains on by its name; nanoGPT's pickle is read here.
- ``port``: plans and writes a port; ``source_checks`` looks at what lies beside the weights,
  ``targets`` chooses format and dialect, ``parameter_order`` says in which order a class has its
  parameters, ``writers`` writes each format, ``certificate`` records what was done.
- ``peft``: adapters in PEFT's folders, and merged into weights.
- ``model_types``: the model types of Hugging Face as a table, free of JAX.
- ``formats/``: files. ``mapping/``: which array becomes which. ``dialects/``: one file a code base.
"""

from typing import TYPE_CHECKING

from jaxformer import lazy_attributes

if TYPE_CHECKING:
    from jaxformer.porting.api import from_torch, to_torch
    from jaxformer.porting.checkpoint import open_checkpoint
    from jaxformer.porting.mapping.naming import export_arrays, import_arrays
    from jaxformer.porting.text_models import load_model
    from jaxformer.porting.train_states import train_state_from_torch, train_state_to_torch

__all__ = [
    "export_arrays",
    "from_torch",
    "import_arrays",
    "load_model",
    "open_checkpoint",
    "to_torch",
    "train_state_from_torch",
    "train_state_to_torch",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "export_arrays": "mapping.naming",
        "from_torch": "api",
        "import_arrays": "mapping.naming",
        "load_model": "text_models",
        "open_checkpoint": "checkpoint",
        "to_torch": "api",
        "train_state_from_torch": "train_states",
        "train_state_to_torch": "train_states",
    },
)
