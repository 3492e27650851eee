"""The picture of each inspection, drawn from its numbers alone, and how all pictures look."""

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from jaxformer.inspection.charts import Numbers, costs, gradients, init, norms, scaling
from jaxformer.inspection.maps import attention, experts, masks, positions

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#444444",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "image.interpolation": "nearest",
    "figure.constrained_layout.use": True,
}
PICTURES: dict[str, Callable[[Numbers], Figure]] = {
    "attention": attention,
    "experts": experts,
    "gradients": gradients,
    "init": init,
    "norms": norms,
    "positions": positions,
    "masks": masks,
    "scaling": scaling,
    "costs": costs,
}


def save_picture(what: str, numbers: Numbers, path: Path | IO[bytes]) -> None:
    """Draws the numbers of an inspection, in the format that the path's suffix names, else PNG."""
    with mpl.rc_context(STYLE):
        PICTURES[what](numbers).savefig(path, dpi=150, facecolor="white")
