"""The collectives of a compiled program, read from its text (HLO), and the bytes that they send.

A collective inside a loop counts as often as the loop runs. The bytes are those of the ring
algorithms (Thakur, Rabenseifner and Gropp, 2005, sections 4.1 to 4.5); no other algorithm sends
less: of n devices each with p bytes, an all-gather sends (n - 1) · p, a
reduce-scatter or an all-to-all (n - 1) / n · p, an all-reduce 2 · (n - 1) / n · p, a permutation p.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
    "c64": 64, "c128": 128, "f8e4m3fn": 8, "f8e5m2": 8,
}  # fmt: skip
KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program, or several of the same kind over the same devices.

    Attributes:
        kind: one of ``KINDS``.
        axes: the mesh axes along which its devices lie.
        devices: how many form one group.
        count: how often it runs in one run of the program.
        payload: bytes of one device's input, over all these runs.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    count: int
    payload: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends in all runs together, by the ring algorithms."""
        return ring_factor(self.kind, self.devices) * self.payload


def ring_factor(kind: str, devices: int) -> float:
    """Returns the bytes that one of ``devices`` sends for each byte of its input."""
    share = (devices - 1) / devices
    return {
        "all-gather": devices - 1.0,
        "all-reduce": 2 * share,
        "reduce-scatter": share,
        "all-to-all": share,
        "collective-permute": 1.0,
    }[kind]


def merge(collectives: Sequence[Collective]) -> list[Collective]:
    """Joins collectives of the same kind over the same axes; those that send most come first."""
    together: dict[tuple[str, tuple[str, ...], int], list[Collective]] = defaultdict(list)
    for one in collectives:
        together[one.kind, one.axes, one.devices].append(one)
    merged = [
        Collective(*key, sum(c.count for c in found), sum(c.payload for c in found))
        for key, found in together.items()
    ]
    return sorted(merged, key=lambda c: -c.sent)


def read_collectives(text: str, mesh: Mapping[str, int], *, steps: int = 1) -> list[Collective]:
    """Returns the collectives of a compiled program, merged.

    Args:
        text: of the compiled program, ``jax.stages.Compiled.as_text()``.
        mesh: sizes of the axes, in the order of its devices.
        steps: how often a loop runs whose length XLA does not know: the loop over steps.

    Raises:
        ValueError: the groups of a collective are written in an unknown way.
    """
    program = _HloProgram(text)
    return merge([found for found in program.collectives(mesh, steps) if found.devices > 1])


@dataclasses.dataclass(frozen=True)
class _HloInstruction:
    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    def called(self, *attributes: str) -> list[str]:
        """Returns the computations that the named attributes refer to."""
        pattern = rf"\b(?:{'|'.join(attributes)})=\{{?(%?[\w.\-]+(?:, *%?[\w.\-]+)*)"
        found = re.findall(pattern, self.rest)
        return [name.strip().lstrip("%") for names in found for name in names.split(",")]


class _HloProgram:
    """A program in HLO: computations by name, each a list of instructions."""

    _HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\{\s*$")
    _LINE = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
    # After the result's shape, which may be a tuple, stands the operation and what it takes.
    _CALL = re.compile(r"^(.*?)\s([a-z][a-z0-9\-]*)\((.*)$")

    def __init__(self, text: str):
        self.computations: dict[str, list[_HloInstruction]] = {}
        self.entry = ""
        current: list[_HloInstruction] = []
        for line in text.splitlines():
            head = self._HEAD.match(line)
            if head:
                current = self.computations.setdefault(head[2], [])
                self.entry = head[2] if head[1] else self.entry
            elif found := self._LINE.match(line):
                call = self._CALL.match(found[3])
                if call:
                    operands, rest = _split_operands(call[3])
                    root = found[1] is not None
                    current.append(
                        _HloInstruction(found[2], call[1], call[2], operands, rest, root)
                    )

    def collectives(self, mesh: Mapping[str, int], steps: int) -> Iterator[Collective]:
        # Where a collective runs beside other work its parts repeat it, with the same channel.
        channels = set()
        shared = self._shared_channels()
        for name, times in self._times(steps).items():
            sizes = {i.name: _bytes(i.result) for i in self.computations[name]}
            for instruction in self.computations[name]:
                kind = instruction.opcode.removesuffix("-start")
                if kind in KINDS:
                    channel = re.search(r"channel_id=\d+", instruction.rest)
                    is_known = channel is not None and channel[0] not in shared
                    key = channel[0] if channel and is_known else instruction.name
                    if key in channels:
                        continue
                    channels.add(key)
                    if kind == "all-reduce" and "all-reduce-scatter" in name:
                        # A TPU's reduce-scatter: a reduction of which a device keeps its part.
                        kind = "reduce-scatter"
                    axes, devices = _group(instruction.rest, mesh)
                    payload = sum(sizes.get(operand, 0) for operand in instruction.operands)
                    yield Collective(kind, axes, devices, times, payload * times)

    def _shared_channels(self) -> set[str]:
        """Returns channels of different collectives: all that a program asks for by itself."""
        found = defaultdict(set)
        for instructions in self.computations.values():
            for each in instructions:
                kind = each.opcode.removesuffix("-start")
                channel = re.search(r"channel_id=\d+", each.rest)
                if kind in KINDS and channel and each.opcode == kind:
                    found[channel[0]].add((kind, each.result))
        return {channel for channel, different in found.items() if len(different) > 1}

    def _times(self, steps: int) -> dict[str, int]:
        """Returns how often each computation runs that is reached from the entry."""
        times: dict[str, int] = defaultdict(int)

        def visit(name: str, count: int) -> None:
            times[name] += count
            for instruction in self.computations.get(name, []):
                if instruction.opcode == "while":
                    trips = self._trip_count(instruction)
                    for body in instruction.called("body"):
                        visit(body, count * (steps if trips is None else trips))
                elif instruction.opcode in ("fusion", "call", "async-start", "custom-call"):
                    for called in instruction.called("calls", "to_apply", "called_computations"):
                        visit(called, count)
                elif instruction.opcode == "conditional":
                    for called in instruction.called(
                        "branch_computations", "true_computation", "false_computation"
                    ):
                        visit(called, count)

        visit(self.entry, 1)
        return {name: count for name, count in times.items() if name in self.computations}

    def _trip_count(self, loop: _HloInstruction) -> int | None:
        """Returns how often a loop runs, by XLA or by its condition; None if unknown."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
        if found:
            return int(found[1])
        for name in loop.called("condition"):
            condition = {i.name: i for i in self.computations.get(name, [])}
            for instruction in condition.values():
                if instruction.opcode == "compare" and "direction=LT" in instruction.rest:
                    counter, limit = (condition.get(o) for o in instruction.operands)
                    if counter is None or limit is None or limit.opcode != "constant":
                        return None
                    return -(-int(limit.operands[0]) // self._stride(loop, counter.rest))
        return None

    def _stride(self, loop: _HloInstruction, counter: str) -> int:
        """Returns what a loop's body adds to its counter; 1 where that cannot be read."""
        place = re.search(r"index=(\d+)", counter)
        for name in loop.called("body") if place else []:
            body = {i.name: i for i in self.computations.get(name, [])}
            root = next((i for i in body.values() if i.root and i.opcode == "tuple"), None)
            new = None if root is None or place is None else body.get(root.operands[int(place[1])])
            if new is not None and new.opcode == "add":
                parts = [body[o] for o in new.operands if o in body]
                steps = [i.operands[0] for i in parts if i.opcode == "constant"]
                return int(steps[0]) if steps else 1
        return 1


def _split_operands(text: str) -> tuple[tuple[str, ...], str]:
    """Splits the text after an opening parenthesis into operands and what follows them."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            names = re.findall(r"%([\w.\-]+)", text[:place])
            if not names:
                names = [part.split()[-1] for part in text[:place].split(",") if part.strip()]
            return tuple(names), text[place + 1 :]
    return (), ""


def _bytes(shapes: str) -> int:
    """Returns the size of a result in bytes; of a tuple, all of its members together."""
    total = 0
    for dtype, dimensions in re.findall(r"\b([a-z]+\d*(?:e\dm\d(?:fn)?)?)\[([\d,]*)\]", shapes):
        if dtype in BITS:
            elements = math.prod(int(d) for d in dimensions.split(",") if d)
            total += -(-elements * BITS[dtype] // 8)
    return total


def _group(rest: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Returns the axes along which a collective's first group of devices lies, and its size."""
    sizes = tuple(mesh.values())
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", rest):
        ends = np.array([int(n) for n in re.findall(r"\d+", pairs[1])]).reshape(-1, 2)
        differ = [np.any(p[:, 0] != p[:, 1]) for p in np.stack(np.unravel_index(ends, sizes))]
        axes = tuple(axis for axis, moves in zip(mesh, differ, strict=True) if moves)
        return axes, math.prod(mesh[axis] for axis in axes)
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        members = np.array([int(one) for one in listed[1].split(",")])
    elif iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape, order, turned = ([int(n) for n in (g or "").split(",") if n] for g in iota.groups())
        devices = np.arange(math.prod(order)).reshape(order)
        members = (devices.transpose(turned) if turned else devices).reshape(shape)[0]
    elif named := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? ?\{([^}]*)\}", rest
    ):
        members = _named_members(*named.groups())
    elif re.search(r"replica_groups=\{\}", rest):
        members = np.arange(math.prod(mesh.values()))
    else:
        raise ValueError(f"the groups of a collective cannot be read: {rest[:200]}")
    places = np.unravel_index(members, sizes)
    axes = tuple(axis for axis, p in zip(mesh, places, strict=True) if len(set(p.tolist())) > 1)
    return axes, len(members)


def _named_members(mesh: str, ids: str | None, axes: str) -> np.ndarray:
    """Returns the first group of a mesh that XLA names itself, over axes or parts, ``:(1)2``."""
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    devices = np.arange(math.prod(sizes.values()))
    if ids and (iota := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids)):
        shape, turned = ([int(n) for n in (g or "").split(",") if n] for g in iota.groups())
        devices = devices.reshape(shape)
        devices = devices.transpose(turned) if turned else devices
    elif ids:
        devices = np.array([int(n) for n in re.findall(r"\d+", ids)])
    devices = devices.reshape(tuple(sizes.values()))
    for place, axis in enumerate(sizes):
        part = re.search(rf"'{axis}'(?::\((\d+)\)(\d+))?", axes)
        among, stride = (1, 1) if part is None else (sizes[axis], 1)
        if part is not None and part[1]:
            among = int(part[2])
            stride = sizes[axis] // (int(part[1]) * among)
        devices = devices.take(range(0, stride * among, stride), axis=place)
    return devices.ravel()
