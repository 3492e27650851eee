"""Positions of both sides: rotary tables, sinusoids, ALiBi slopes and position ids.

Cosines and sines are float32 functions of position · frequency, and the powers of two libraries
differ in the last bit: at position 5000 that is 3e-4 of the table. It would look like a bug of
every attention. So the tables are judged separately, and then both sides use the reference's.
The same is true of sinusoids that transformers computes and does not save (XGLM).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

import jaxformer.positions
from jaxformer.parameters import join_path
from jaxformer.parity.findings import Difference, Node
from jaxformer.parity.matching.pairs import Pair
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.recording.reference_modules import modules_of
from jaxformer.parity.recording.torch_values import array, floats, require_torch, without_fast_path
from jaxformer.porting.mapping.position_tables import PositionTable
from jaxformer.positions import LearnedPositions, Rotary, SinusoidalPositions
from jaxformer.transformer_lm import TransformerLM

# Cosines and sines (T, width / 2).
Tables = tuple[np.ndarray, np.ndarray]


class Made(NamedTuple):
    """What a module of the reference returned.

    Attributes:
        order: the place of its first call among all calls.
        calls: of each call, the float arrays that it returned.
    """

    order: int
    calls: Sequence[Sequence[np.ndarray]]


# Words in the names of the reference's classes that compute tables when they are called.
ROTARY, SINUSOIDAL = "Rotary", "SinusoidalPositionalEmbedding"
# How far the squares of a rounded sine and cosine may be from 1 together; those of bfloat16 are.
ON_THE_CIRCLE = 2.0**-6


def share_tables(
    module: Any, torch_module: Any, made: Mapping[str, Made], *, share_wrong: bool = True
) -> list[Node]:
    """Gives the candidate's positions the tables that a module of the reference made.

    An angle is accurate to a few units in the last place of float32, so an entry may be off by
    2^-22 · (1 + position).

    Args:
        module: the candidate, whose rotary or sinusoidal positions are changed.
        torch_module: the reference.
        made: what its modules returned in a pass with positions 0 … T - 1, by path.
        share_wrong: whether to replace tables with a bug too, so that no other module shows it.

    Returns:
        A node for each rotary position whose table has a bug, or for the first one if none has.
    """
    found = reference_tables(torch_module, made)
    if not found or not any(isinstance(node, Rotary) for _, node in nnx.iter_modules(module)):
        return _share_sinusoids(module, torch_module, made, share_wrong)
    nodes = []
    # Of a long context tables are large: layers that have the same ones hold them once.
    given: dict[tuple[int, int], tuple[PositionTable, PositionTable]] = {}
    for path, node in nnx.iter_modules(module):
        if not isinstance(node, Rotary):
            continue
        reference_path, tables = nearest_tables(node, found)
        difference = table_difference(node.tables(len(tables[0])), tables)
        name = join_path(path)
        if difference is None:
            message = f"it rotates {node.width} dimensions, the reference {2 * tables[0].shape[1]}"
            difference = Difference(float("inf"), 1.0, 0.0)
        else:
            message = "its angles differ: check the base, the scaling and the rotated dimensions"
            if share_wrong or not difference.is_bug:
                key = id(tables), node.max_length
                node.cos, node.sin = given[key] = given.get(key) or _padded(tables, key[1])
        nodes.append(
            Node(
                name, reference_path, "Rotary",
                type(torch_module.get_submodule(reference_path)).__name__,
                depth=name.count("."), order=made[reference_path].order,
                forward=difference, message=message,
            )
        )  # fmt: skip
    bugs = [node for node in nodes if node.forward is not None and node.forward.is_bug]
    return bugs or nodes[:1]


def computes_tables(module: Any) -> bool:
    """Whether a module of the reference has tables of positions, or computes them when called."""
    named = any(word in type(module).__name__ for word in (ROTARY, SINUSOIDAL))
    return named or held_tables(module) is not None


def held_tables(module: Any) -> Tables | None:
    """Returns the rotary tables that a module of the reference keeps in an array, if it does.

    GPT-J's and CodeGen's attentions keep sines and cosines side by side, (T, width), and RoFormer
    in an embedding that is not trained.
    """
    holds_rows = SINUSOIDAL in type(module).__name__ or type(module).__name__ == "Embedding"
    kept = module.parameters(recurse=False) if holds_rows else ()
    for buffer in (*module.buffers(recurse=False), *kept):
        if buffer.ndim != 2 or not buffer.is_floating_point() or buffer.shape[1] % 2:
            continue
        # Most are embeddings of words, whose first row shows it; a streamed model has no numbers.
        if buffer.is_meta or not _is_rotation(buffer[:1]):
            continue
        if _is_rotation(buffer):
            halves = np.split(buffer.detach().double().cpu().numpy(), 2, axis=1)
            sin, cos = halves if halves[1][0, 0] == 1 else halves[::-1]
            return cos, sin
    return None


def _is_rotation(rows: Any) -> bool:
    """Whether every row (T, width) has cosines and sines side by side."""
    halves = np.split(rows.detach().double().cpu().numpy(), 2, axis=1)
    distance = np.abs(halves[0] ** 2 + halves[1] ** 2 - 1)
    return bool(distance.size and distance.max() < ON_THE_CIRCLE)


def _share_sinusoids(
    module: Any, torch_module: Any, made: Mapping[str, Made], share_wrong: bool
) -> list[Node]:
    """Does what ``share_tables`` does for the sinusoids that are added to token embeddings."""
    modules = modules_of(torch_module)
    name, paths = "position_embedding", [p for p in made if _makes_rows(modules[p])]
    if not isinstance(getattr(module, name, None), SinusoidalPositions):
        # Whisper's decoder learns its positions.
        name = "source_position_embedding"
    node = getattr(module, name, None)
    if not paths or not isinstance(node, SinusoidalPositions):
        return []
    order, ((first, *_), *_) = made[paths[0]]
    rows = first.reshape(-1, *first.shape[-2:])[0]
    difference = table_difference((node.rows(),), (rows,))
    if difference is None:
        difference = Difference(float("inf"), 1.0, 0.0)
    elif share_wrong or not difference.is_bug:
        node.table = PositionTable(_pad_rows(rows, node.max_length))
    return [
        Node(
            name, paths[0], "SinusoidalPositions", type(modules[paths[0]]).__name__,
            depth=0, order=order, forward=difference,
            message="its rows differ: check the offset and the order of sines and cosines",
        )
    ]  # fmt: skip


def _makes_rows(module: Any) -> bool:
    """Whether a module of the reference gives sinusoids: by its name, or an embedding of them."""
    name = type(module).__name__
    return SINUSOIDAL in name or (name == "Embedding" and held_tables(module) is not None)


def share_tables_of_length(
    module: Any, torch_module: Any, call: Callable[[Any, Any], Any], length: int
) -> list[Node]:
    """Runs the reference on ``length`` tokens and shares its tables, except those with a bug.

    Args:
        module: the candidate, whose rotary or sinusoidal positions are changed.
        torch_module: the reference, in float64.
        call: how the reference is called with ids (1, T).
        length: T.
    """
    torch = require_torch()
    made: dict[str, Made] = {}

    def keep(path: str, module: Any, args: Any, output: Any) -> None:
        before = made.get(path, Made(len(made), []))
        arrays = [array(tensor) for tensor in floats(output)]
        made[path] = Made(before.order, [*before.calls, arrays])

    with contextlib.ExitStack() as stack:
        for path, inner in torch_module.named_modules():
            if computes_tables(inner):
                hook = inner.register_forward_hook(functools.partial(keep, path))
                stack.callback(hook.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_fast_path())
        call(torch_module, torch.zeros((1, length), dtype=torch.int64))
    return share_tables(module, torch_module, made, share_wrong=False)


def reference_tables(torch_module: Any, made: Mapping[str, Made]) -> list[tuple[str, Tables]]:
    """Returns the reference's rotary tables, each with the path of the module that made them.

    There are several where layers differ: Gemma 3 asks one module twice.
    """
    modules = modules_of(torch_module)
    found = []
    for path, (_, calls) in made.items():
        if ROTARY not in type(modules[path]).__name__:
            held = held_tables(modules[path])
            found += [] if held is None else [(path, held)]
            continue
        for outputs in calls:
            if len(outputs) == 2 and outputs[0].shape == outputs[1].shape:
                cos, sin = (a.reshape(-1, *a.shape[-2:])[0] for a in outputs)
                if not cos[0].any():
                    # The sine of position 0 is 0: GPT-J's sines come first.
                    cos, sin = sin, cos
                half = cos.shape[-1] // 2
                if np.array_equal(cos[:, :half], cos[:, half:]):
                    cos, sin = cos[:, :half], sin[:, :half]
                elif np.array_equal(cos[:, ::2], cos[:, 1::2]):
                    # Of neighbours: Cohere's.
                    cos, sin = cos[:, ::2], sin[:, ::2]
                found.append((path, (cos, sin)))
    return found


def nearest_tables(node: Rotary, found: Sequence[tuple[str, Tables]]) -> tuple[str, Tables]:
    """Returns of the reference's tables those that a rotary position's own are nearest to."""

    def distance(tables: Tables) -> float:
        difference = table_difference(node.tables(len(tables[0])), tables)
        return float("inf") if difference is None else difference.error / difference.allowed

    return min(found, key=lambda pair: distance(pair[1]))


def give_tables(node: Rotary, tables: Tables) -> None:
    """Makes a rotary position of the candidate use these tables."""
    node.cos, node.sin = _padded(tables, node.max_length)


def _padded(tables: Tables, length: int) -> tuple[PositionTable, PositionTable]:
    """Returns tables of this length, with rows of zeros for positions that were not reached."""
    cos, sin = (PositionTable(_pad_rows(table, length)) for table in tables)
    return cos, sin


def table_difference(
    candidate: Sequence[np.ndarray], reference: Sequence[np.ndarray]
) -> Difference | None:
    """Returns the worst entry, judged at its position; None if the shapes do not fit."""
    length = reference[0].shape[0]
    if any(
        a.shape[0] < length or a.shape[1:] != b.shape[1:]
        for a, b in zip(candidate, reference, strict=True)
    ):
        return None
    error = np.max(
        [np.abs(a[:length] - b) for a, b in zip(candidate, reference, strict=True)], axis=(0, 2)
    )
    allowed = 2.0**-22 * (1 + np.arange(length))
    worst = int(np.argmax(error / allowed))
    return Difference(float(error[worst]), 1.0, float(allowed[worst]))


def _pad_rows(table: np.ndarray, length: int) -> np.ndarray:
    """Returns the table with rows of zeros for positions that the pass did not reach."""
    padded = np.zeros((max(length, len(table)), table.shape[1]))
    padded[: len(table)] = table
    return padded


@contextlib.contextmanager
def match_alibi_slopes(torch_module: Any) -> Iterator[None]:
    """Makes the candidate's slopes equal the reference's inside the ``with`` block, in float64.

    Slopes that are not powers of two are rounded where a model keeps them in float32 (in buffers or
    tables), and are exact where it computes them during the call. Both are correct.
    """
    is_rounded = type(torch_module).__module__.startswith("torch_ref") or any(
        name.endswith("slopes") for name, _ in torch_module.named_buffers()
    )
    original = jaxformer.positions.alibi_slopes

    def rounded_slopes(num_heads: int, max_bias: float = 8.0) -> np.ndarray:
        return original(num_heads, max_bias).astype(np.float64)

    slopes = rounded_slopes if is_rounded else jaxformer.positions._exact_slopes
    jaxformer.positions.alibi_slopes = slopes  # type: ignore[assignment]
    try:
        yield
    finally:
        jaxformer.positions.alibi_slopes = original


def position_ids_from_mask(
    module: Any,
    pairs: Sequence[Pair],
    given: Mapping[str, np.ndarray],
    padding: Mapping[tuple[int, ...], np.ndarray],
) -> dict[str, np.ndarray]:
    """Returns the argument ``positions`` (B, T) that the candidate needs to match the reference.

    OPT counts only the tokens that its mask allows, so that padding on the left does not move a
    text. The candidate then gets these positions as an argument, as in generation; padding gets 0.

    Args:
        module: the candidate.
        pairs: all pairs of modules.
        given: of modules of the reference that got any, their position ids (B, T), by path.
        padding: which tokens of a pass are padding, by shape (B, T).

    Returns:
        No argument where padding changed no position.
    """
    if not isinstance(module, TransformerLM):
        return {}
    for pair in pairs:
        if isinstance(jax_modules.resolve(module, pair.candidate[0])[0], LearnedPositions):
            positions = given.get(pair.reference[0])
            unused = None if positions is None else padding.get(positions.shape)
            if positions is not None and unused is not None:
                places = np.arange(positions.shape[1])
                is_moved = np.where(unused, places, positions) != places
                return {"positions": np.where(unused, 0, positions)} if is_moved.any() else {}
    return {}
