"""All cases, by name: those of every file in this folder.

A file has ``CASES``, names and cases of a group of families. A type's first case is the one that
the default tier runs: the plainest that still has what makes the type different.
"""

import importlib
import pkgutil

from tests.support.hugging_face import decoders, multimodal
from tests.support.hugging_face.case import Case


def _all() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        cases = importlib.import_module(f"{__name__}.{module}").CASES
        assert not found.keys() & cases.keys(), found.keys() & cases.keys()
        found |= cases
    return found


CASES = _all()
# Those too of models of which a part is ported.
ALL_CASES = {**CASES, **decoders.CASES, **multimodal.CASES}
