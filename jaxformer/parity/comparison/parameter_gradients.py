"""The reference's gradients of parameters, in the candidate's layout."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.modules import TIED_HEAD, Pair
from jaxformer.porting.mapping.rules import Link


class ReferenceGradients:
    """Converts the gradients of the reference's pass, one parameter at a time.

    Args:
        gradients: of the reference's parameters, by name.
        links: which arrays of both sides hold the same numbers; of the others none is known.
        modules: of the reference, by path.
        is_single_use: whether gradients may be freed once they are taken.

    Attributes:
        untrained: embeddings to whose padding token the reference gives no gradient, unlike the
            candidate.
    """

    def __init__(
        self,
        gradients: dict[str, np.ndarray],
        links: Sequence[Link],
        modules: Mapping[str, Any],
        is_single_use: bool,
    ):
        self.gradients = gradients
        self.modules = modules
        self.is_single_use = is_single_use
        self.untrained: list[str] = []
        # Converted gradients of arrays from which not all parameters have been taken yet.
        self._converted: dict[tuple[str, ...], dict[str, np.ndarray]] = {}
        self._links = {name: link for link in links for name in link.target}

    def find(self, name: str, pair: Pair, own: np.ndarray) -> np.ndarray | None:
        """Returns the reference's gradient of a parameter, as far as it came through a pair.

        Args:
            name: of the candidate's parameter; each may be taken once for each pair.
            pair: the modules.
            own: the candidate's gradient.

        Returns:
            The gradient in the candidate's layout; None if it is not known.
        """
        gradients = self.gradients
        link = self._links.get(name)
        if link is None:
            return None
        names = list(link.source)
        if pair.candidate == (TIED_HEAD,):
            names = [f"{pair.reference[0]}.{name.rpartition('.')[2]}" for name in names]
        converted = self._converted.get(tuple(names))
        if converted is None:
            # A parameter that the pass does not use has no gradient.
            arrays = [
                gradients.get(name, np.zeros(shape))
                for name, shape in zip(names, link.source_shapes, strict=True)
            ]
            converted = dict(zip(link.target, link.to_target(arrays), strict=True))
            self._converted[tuple(names)] = converted
        gradient = converted.pop(name)
        if not converted:
            del self._converted[tuple(names)]
            # All gradients together are as large as the model.
            for each in names if self.is_single_use else ():
                gradients.pop(each, None)
        padding = getattr(self.modules[pair.reference[0]], "padding_idx", None)
        if padding is not None and name.endswith("embedding"):
            # torch.nn.Embedding never trains the row of its padding token, which is no bug.
            if not np.array_equal(gradient[padding], own[padding]):
                self.untrained.append(f"{pair.reference_path} (row {padding})")
            gradient[padding] = own[padding]
        return gradient
