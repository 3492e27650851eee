"""The reference's gradients, pair by pair: each module runs again, and backward, by itself."""

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.calls.calls import MatchedCall, calls_inside
from jaxformer.parity.matching.pairs import TIED_HEAD, Pair, PairKey
from jaxformer.parity.recording.calls.padding import unused_tokens, without_unused
from jaxformer.parity.recording.calls.torch_isolated import Directions, pull_back
from jaxformer.parity.recording.calls.torch_recorder import TorchCall
from jaxformer.parity.recording.calls.torch_trace import Trace, exactly
from jaxformer.parity.recording.reference_modules import owner_of
from jaxformer.porting.mapping.rules import Link


class ReferenceGradients:
    """Pulls random gradients back through the reference's modules, each of them isolated.

    Args:
        module: the reference; the weights of the modules that are asked for are in memory.
        modules: its modules by path.
        trace: its pass, in which gradients are left while a pair is compared.
        links: which arrays of both sides hold the same numbers; of the others none is known.

    Attributes:
        untrained: embeddings to whose padding token the reference gives no gradient, unlike the
            candidate.
        trained_buffers: by name, the parameters of the candidate that are buffers of the reference,
            which no optimizer moves.
        derived: pairs in which a submodule of the reference has a second result, made of the one
            that is compared: a router's weights, made of its scores.
        unknown: pairs whose gradients are not known, and why not.
    """

    def __init__(
        self, module: Any, modules: Mapping[str, Any], trace: Trace, links: Sequence[Link]
    ):
        self._module, self._modules = module, modules
        self._unused = unused_tokens(trace.calls.values(), trace.padding)
        self._links = {name: link for link in links for name in link.target}
        ported = {name for link in links for name in link.source}
        # By identity, the names of buffers that are parameters of the candidate.
        self._buffers = {
            id(buffer): [name] for name, buffer in module.named_buffers() if name in ported
        }
        self.trained_buffers: dict[str, str] = {}
        self.untrained: list[str] = []
        self.derived: set[PairKey] = set()
        self.unknown: dict[str, str] = {}
        # Of the parameters of the pair that is compared, in both layouts.
        self._gradients: dict[str, np.ndarray] = {}
        self._converted: dict[tuple[str, ...], dict[str, np.ndarray] | None] = {}

    @contextlib.contextmanager
    def of(
        self, pair: Pair, matched: Sequence[MatchedCall], inner: Sequence[Sequence[MatchedCall]]
    ) -> Iterator[bool]:
        """Knows the gradients of a pair inside the ``with`` block.

        They are in its calls, in those of the pairs inside it, and ``find`` returns the others.

        Args:
            pair: the modules.
            matched: its calls.
            inner: of each call, the calls of pairs inside it, whose results are given.

        Yields:
            Whether they are known.
        """
        touched: list[TorchCall] = []
        try:
            yield self._pull(pair, matched, inner, touched)
        finally:
            for call in touched:
                call.input_gradients, call.output_gradients = [], []
            self._gradients, self._converted = {}, {}

    def _pull(
        self,
        pair: Pair,
        matched: Sequence[MatchedCall],
        inner: Sequence[Sequence[MatchedCall]],
        touched: list[TorchCall],
    ) -> bool:
        totals: dict[int, np.ndarray] = {}
        names = dict(self._buffers)
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for number, (call, within) in enumerate(zip(matched, inner, strict=True)):
            for path, own in zip(pair.reference, call.reference, strict=True):
                forced = calls_inside(path, within)
                entered = {id(c): m for m in within for c in m.reference}
                touched += [own, *(each for calls in forced.values() for each in calls)]
                try:
                    with exactly():
                        found = pull_back(
                            self._module, path, own, forced,
                            self._directions(path, number, read_outputs(call), entered),
                            self._buffers,
                        )  # fmt: skip
                except (ValueError, RuntimeError) as error:
                    self.unknown[pair.path or "the model"] = str(error).partition("\n")[0]
                    return False
                if found.has_derived:
                    self.derived.add(pair.candidate)
                for key, gradient in found.parameters.items():
                    totals[key] = totals[key] + gradient if key in totals else gradient
        self._gradients = {name: totals[key] for key in totals for name in names.get(key, ())}
        return True

    def _directions(
        self, path: str, number: int, outputs: set[int], entered: Mapping[int, MatchedCall]
    ) -> Directions:
        """Returns what makes a gradient in every direction, so that no difference can hide."""
        random = random_of_call(path, number)

        def draw(array: np.ndarray) -> np.ndarray:
            return without_unused(random.uniform(-1, 1, array.shape), self._unused)

        def of_result(place: int, array: np.ndarray) -> np.ndarray | None:
            return draw(array) if place in outputs else None

        def of_entered(call: TorchCall, place: int, array: np.ndarray) -> np.ndarray | None:
            read = entered[id(call)].input_alignments[0].places
            same = {call.identities[n] for n in read if n is not None}
            return draw(array) if call.identities[place] in same else None

        def is_compared(call: TorchCall, place: int) -> bool:
            return place in read_outputs(entered[id(call)])

        return Directions(of_result, of_entered, is_compared)

    def remarks(self) -> Iterator[str]:
        """Yields what is to be said of the gradients that were compared."""
        if self.untrained:
            places = ", ".join(self.untrained)
            yield f"the reference gives padding tokens no gradient, the candidate does: {places}"
        for name, buffer in self.trained_buffers.items():
            yield (
                f"{buffer} is a buffer, which no optimizer of the reference moves; the candidate's "
                f"{name} is trained"
            )
        for path, reason in self.unknown.items():
            yield f"gradients of {path} were not compared: {reason}"

    def find(self, name: str, pair: Pair, own: np.ndarray) -> np.ndarray | None:
        """Returns the gradient of a parameter, as far as it came through the pair.

        Args:
            name: of the candidate's parameter.
            pair: the modules, inside ``of``.
            own: the candidate's gradient.

        Returns:
            The gradient in the candidate's layout; None if it is not known.
        """
        link = self._links.get(name)
        if link is None:
            return None
        names = tuple(link.source)
        module = self._modules[pair.reference[0]]
        if pair.candidate == (TIED_HEAD,):
            owner = owner_of(pair.reference[0], module)
            names = tuple(f"{owner}.{name.rpartition('.')[2]}" for name in names)
        if names not in self._converted:
            self._converted[names] = self._convert(names, link, pair)
        converted = self._converted[names]
        if converted is None:
            return None
        gradient = converted.pop(name)
        buffers = [n for same in self._buffers.values() for n in same if n in names]
        if buffers and gradient.any():
            self.trained_buffers[name] = buffers[0]
        padding = getattr(module, "padding_idx", None)
        if padding is not None and name.endswith("embedding"):
            # torch.nn.Embedding never trains the row of its padding token, which is no bug.
            if not np.array_equal(gradient[padding], own[padding]):
                self.untrained.append(f"{pair.reference_path} (row {padding})")
            gradient[padding] = own[padding]
        return gradient

    def _convert(
        self, names: Sequence[str], link: Link, pair: Pair
    ) -> dict[str, np.ndarray] | None:
        owners = [owner_of(path, self._modules[path]) for path in pair.reference]
        inside = all(any(f"{n}.".startswith(f"{o}.") or not o for o in owners) for n in names)
        if not inside and not all(name in self._gradients for name in names):
            return None
        # A parameter that the call does not use has no gradient.
        arrays = [
            self._gradients.pop(name) if name in self._gradients else np.zeros(shape)
            for name, shape in zip(names, link.source_shapes, strict=True)
        ]
        return dict(zip(link.target, link.to_target(arrays), strict=True))


def random_of_call(path: str, number: int) -> np.random.Generator:
    """Returns what draws the gradients of one call of one module of the reference."""
    return np.random.default_rng([zlib.crc32(path.encode()), number])


def read_outputs(call: MatchedCall) -> set[int]:
    """Returns which results of the reference's modules the candidate has too."""
    if len(call.reference) > 1 or len(call.candidate) > 1:
        return {0}
    return {n for a in call.output_alignments for n in a.places if n is not None}
