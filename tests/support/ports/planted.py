"""Builds ports from their source, with a bug planted in one line of it."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
_count = itertools.count()


def build_port(name, reference, folder, old="", new=""):
    """Returns a candidate, and the "path:line" of the planted bug.

    Args:
        name: of the port's file.
        reference: the PyTorch module whose arrays it gets.
        folder: where the changed file is written.
        old: text that stands in the port's file once.
        new: what takes its place.
    """
    text = (HERE / f"{name}.py").read_text()
    source = ""
    path = Path(folder) / f"{name}_{next(_count)}.py"
    if old:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
        source = f"{path}:{text[: text.index(old)].count(chr(10)) + 1}"
        text = text.replace(old, new)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arrays = {n: np.asarray(t.detach()) for n, t in reference.state_dict().items()}
    return module.build(arrays), source


def line_of(path, text):
    """Returns "path:line" of the one line of a file that is this text."""
    lines = [line.strip() for line in Path(path).read_text().splitlines()]
    assert lines.count(text) == 1, f"{text!r} is {lines.count(text)} lines of {path}"
    return f"{path}:{lines.index(text) + 1}"
