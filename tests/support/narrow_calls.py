"""Custom calls built for registers of half the width, which this processor has too."""

import functools
from collections.abc import Iterable
from types import ModuleType

import pytest

from jaxformer.hardware import custom_calls
from jaxformer.hardware.custom_call_builds import UnavailableError, fast_options

BUILDS = ("this processor", "narrower registers")


@functools.cache
def _register(name: str, targets: tuple[str, ...], functions: tuple[str, ...]) -> bool:
    options = [*fast_options(name)[0], "-mno-avx512f", "-w"]
    try:
        library = custom_calls.load(name, [options])
    except UnavailableError:
        return False
    custom_calls.register(library, dict(zip(targets, functions, strict=True)))
    return True


def register_narrow(name: str, functions: Iterable[str], prefix: str = "") -> None:
    """Makes functions of a library known to XLA as ``narrow_`` and their names.

    Skips the test where the compiler knows no registers of other widths.

    Args:
        name: of the library's source.
        functions: as XLA's names end.
        prefix: with which they begin in the library.
    """
    names = tuple(functions)
    targets = tuple(f"narrow_{name}" for name in names)
    if not _register(name, targets, tuple(prefix + name for name in names)):
        pytest.skip("the compiler knows no registers of other widths")


def use_build(build: str, calls: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a test use custom calls for one of ``BUILDS``.

    Args:
        build: which one.
        calls: the module of ``jaxformer.hardware`` with their ``TARGETS``, each under a name too.
        monkeypatch: changes these names until the test ends.
    """
    if build == "narrower registers":
        register_narrow(calls.NAME, calls.TARGETS)
        for name, target in list(vars(calls).items()):
            if isinstance(target, str) and target in calls.TARGETS:
                monkeypatch.setattr(calls, name, f"narrow_{target}")
