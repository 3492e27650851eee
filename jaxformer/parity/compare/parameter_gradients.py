"""Their gradients of parameters, in our layout."""

import functools

import numpy as np

from jaxformer.parity.matching.modules import TIED_HEAD, Pair
from jaxformer.parity.trace.reference_run import ReferenceRun
from jaxformer.porting.mapping.rules import Link


class ReferenceGradients:
    """What their pass gave, converted as it is asked for.

    Args:
        reference: of a known dialect; of others nothing is known.

    Attributes:
        untrained: their embeddings that give no gradient to a padding token which ours trains.
    """

    def __init__(self, reference: ReferenceRun):
        self.reference = reference
        self.untrained: list[str] = []
        # Those of one array of which some were not yet asked for.
        self._converted: dict[tuple[str, ...], dict[str, np.ndarray]] = {}

    def of(self, name: str, pair: Pair, own: np.ndarray) -> np.ndarray | None:
        """Their gradient of one of our parameters, as far as it came through a pair.

        Args:
            name: of the parameter.
            pair: the modules.
            own: ours.
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
            # Of what nothing is trained by there is none.
            arrays = [
                gradients.get(name, np.zeros(shape))
                for name, shape in zip(names, link.source_shapes, strict=True)
            ]
            converted = dict(zip(link.target, link.to_target(arrays), strict=True))
            self._converted[tuple(names)] = converted
        gradient = converted.pop(name)
        if not converted:
            del self._converted[tuple(names)]
            # Together they are as large as the model.
            for each in names if self.reference.once else ():
                gradients.pop(each, None)
        padding = getattr(self.reference.modules[pair.reference[0]], "padding_idx", None)
        if padding is not None and name.endswith("embedding"):
            # Their row of the padding token is never trained: no one's arithmetic is wrong.
            if not np.array_equal(gradient[padding], own[padding]):
                self.untrained.append(f"{pair.reference_path} (row {padding})")
            gradient[padding] = own[padding]
        return gradient

    @functools.cached_property
    def _links(self) -> dict[str, Link]:
        links = () if self.reference.plan is None else self.reference.plan.links
        return {name: link for link in links for name in link.target}
