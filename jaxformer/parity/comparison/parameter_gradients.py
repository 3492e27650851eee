"""The reference's gradients of parameters, in the candidate's layout."""

import functools

import numpy as np

from jaxformer.parity.comparison.reference_run import ReferenceRun
from jaxformer.parity.matching.modules import TIED_HEAD, Pair
from jaxformer.porting.mapping.rules import Link


class ReferenceGradients:
    """Converts the gradients of the reference's pass, one parameter at a time.

    Args:
        reference: the reference. If it has no dialect, no gradient is known.

    Attributes:
        untrained: embeddings to whose padding token the reference gives no gradient, unlike the
            candidate.
    """

    def __init__(self, reference: ReferenceRun):
        self.reference = reference
        self.untrained: list[str] = []
        # Converted gradients of arrays from which not all parameters have been taken yet.
        self._converted: dict[tuple[str, ...], dict[str, np.ndarray]] = {}

    def find(self, name: str, pair: Pair, own: np.ndarray) -> np.ndarray | None:
        """Returns the reference's gradient of a parameter, as far as it came through a pair.

        Args:
            name: of the candidate's parameter; each may be taken once for each pair.
            pair: the modules.
            own: the candidate's gradient.

        Returns:
            The gradient in the candidate's layout; None if it is not known.
        """
        gradients = self.reference.trace.gradients
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
            for each in names if self.reference.is_single_use else ():
                gradients.pop(each, None)
        padding = getattr(self.reference.modules[pair.reference[0]], "padding_idx", None)
        if padding is not None and name.endswith("embedding"):
            # torch.nn.Embedding never trains the row of its padding token, which is no bug.
            if not np.array_equal(gradient[padding], own[padding]):
                self.untrained.append(f"{pair.reference_path} (row {padding})")
            gradient[padding] = own[padding]
        return gradient

    @functools.cached_property
    def _links(self) -> dict[str, Link]:
        links = () if self.reference.plan is None else self.reference.plan.links
        return {name: link for link in links for name in link.target}
