"""Repros: one pair of modules that differs, with weights and inputs, without the models around it.

``write_repro`` takes two models, their inputs and the path of a node, and writes a folder:

- ``repro.py``: a script of a few lines that runs both modules and prints how they differ.
- ``node.json``: how both modules are built and called.
- ``arrays.safetensors``: weights, arguments and expected results.

The script imports ``Repro``, which reads that folder and runs it.

- ``writer``: chooses the pair and writes the folder.
- ``contents``: runs the pair and collects what the folder holds.
- ``rebuilding``: finds out whether the modules can be built from their settings.
- ``modules``: builds modules, gives them weights, encodes their arguments.
- ``calls``: records how modules are called, and runs one by itself.
- ``runtime``: reads a folder and runs both modules.
"""

from typing import TYPE_CHECKING

from jaxformer import lazy_attributes

if TYPE_CHECKING:
    from jaxformer.parity.repro.runtime import Repro
    from jaxformer.parity.repro.writer import write_repro

__all__ = ["Repro", "write_repro"]

__getattr__ = lazy_attributes(__name__, {"Repro": "runtime", "write_repro": "writer"})
