"""The picture of each inspection, drawn from its numbers alone."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from jaxformer.inspection.charts import costs, gradients, init, norms, scaling
from jaxformer.inspection.maps import attention, masks, positions
from jaxformer.inspection.style import STYLE, Numbers

PICTURES: dict[str, Callable[[Numbers], Figure]] = {
    "attention": attention,
    "gradients": gradients,
    "init": init,
    "norms": norms,
    "positions": positions,
    "masks": masks,
    "scaling": scaling,
    "costs": costs,
}


def save_picture(what: str, numbers: Numbers, path: Path) -> None:
    """Draws the numbers of an inspection, in the format that the path's suffix names."""
    with mpl.rc_context(STYLE):
        PICTURES[what](numbers).savefig(path, dpi=150, facecolor="white")
