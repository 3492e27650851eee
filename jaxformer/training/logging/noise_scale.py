"""The gradient noise scale of a run, from gradients of a step and of its parts."""

from collections.abc import Iterable, Mapping

# Of the running means, as both estimates are noisy; a step's own share is one part in twenty.
DECAY = 0.95


class NoiseScale:
    """Estimates the simple noise scale tr(Σ) / |G|² (McCandlish et al., arXiv 1812.06162, A.1).

    The mean square of the norms of the parts' gradients, E|G_b|² = |G|² + tr(Σ)/b, and that of the
    whole batch's give both unknowns without bias; their running means are divided. Noise is that of
    windows, so the scale is in windows, as the batch size is.

    Args:
        whole: windows of a step.
    """

    def __init__(self, whole: int):
        self._whole = whole
        self._signal = self._noise = 0.0

    def replay(self, records: Iterable[Mapping[str, float]]) -> None:
        """Takes in the records of the steps before, so that a resumed run continues exactly.

        A step counts by the parts that it was made in, which are others on other devices.
        """
        for record in records:
            if "gradient_parts" in record:
                self.update(record)

    def update(self, record: Mapping[str, float]) -> float | None:
        """Returns the noise scale, in windows; None while the estimate of |G|² is not positive.

        Args:
            record: of a step: ``grad_norm``, of its gradient; ``part_grad_norm``, the root of the
                mean square of the norms of its parts' gradients; ``gradient_parts``, how many
                parts there are.
        """
        norm, part_norm = record["grad_norm"], record["part_grad_norm"]
        part, whole = self._whole / record["gradient_parts"], self._whole
        signal = (whole * norm**2 - part * part_norm**2) / (whole - part)
        noise = (part_norm**2 - norm**2) / (1 / part - 1 / whole)
        # Both begin at zero, which cancels in their ratio.
        self._signal = DECAY * self._signal + (1 - DECAY) * signal
        self._noise = DECAY * self._noise + (1 - DECAY) * noise
        return self._noise / self._signal if self._signal > 0 else None
