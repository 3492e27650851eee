"""How all pictures look."""

from collections.abc import Mapping
from typing import Any

Numbers = Mapping[str, Any]

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#8a8f98"
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
