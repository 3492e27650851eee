"""A large output head, in slices of the vocabulary, on both sides.

Logits are products of the hidden states with each row of a matrix, and rows do not meet. So the
module's own code is run on a slice of its rows at a time.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.layers import Embedding, Linear
from jaxformer.parameters import merge
from jaxformer.parity.findings import Difference
from jaxformer.parity.matching.calls.calls import MatchedCall
from jaxformer.parity.matching.pairs import Pair
from jaxformer.parity.recording import jax_modules, torch_values
from jaxformer.parity.recording.calls import jax_trace, torch_trace
from jaxformer.parity.recording.calls.jax_isolated import IsolatedModule, IsolatedOutcome
from jaxformer.parity.recording.jax_values import refill
from jaxformer.parity.recording.memory import LARGE
from jaxformer.parity.segments.calls.reference_gradients import random_of_call
from jaxformer.parity.segments.calls.teacher_forcing import PairDifferences, TeacherForcedRunner
from jaxformer.parity.tolerance import Judgement
from jaxformer.porting.mapping.casts import DTYPES
from jaxformer.porting.mapping.packings import ONE_TO_ONE

# Numbers of a slice: 64 MiB in float64, which about ten arrays have at a time.
SLICE = 1 << 23
Arrays = Mapping[str, np.ndarray]
# The methods of heads.
METHODS: Mapping[Any, str] = {Embedding: "attend", Linear: "__call__"}
# The axis of the vocabulary, by the name of the array; of the others it is the only one.
VOCABULARY_AXIS = {"kernel": 1}


def slices(arrays: Arrays) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
    """Yields slices of the vocabulary, and the arrays of each."""
    name, matrix = max(arrays.items(), key=lambda item: item[1].ndim)
    axis = VOCABULARY_AXIS.get(name, 0)
    step = max(1, SLICE // matrix.shape[1 - axis])
    for start in range(0, matrix.shape[axis], step):
        part = slice(start, start + step)
        yield (
            part,
            {
                name: array[:, part] if name in VOCABULARY_AXIS else array[part]
                for name, array in arrays.items()
            },
        )


def method_of(path: str) -> str:
    """Returns the method of the reference's module that computes a head's product."""
    return "attend" if path.endswith(".attend") else "forward"


def run_slice(
    module: Any, method: str, arrays: Arrays, to_tensor: Callable[[np.ndarray], Any], x: Any
) -> tuple[Any, dict[str, Any]]:
    """Returns the product of a slice of the reference's head, and the parameters of the slice."""
    torch = torch_trace.require_torch()
    part = copy.copy(module)
    own = {name: torch.nn.Parameter(to_tensor(array)) for name, array in arrays.items()}
    vars(part)["_parameters"] = {**module._parameters, **own}
    return getattr(type(module), method)(part, x), own


def candidate_slices(owner: Any, arrays: Arrays, dtype: str) -> Iterator[tuple[slice, Any]]:
    """Yields slices of the vocabulary, and the candidate's head with the arrays of each.

    Args:
        owner: the module.
        arrays: its arrays, by name within it.
        dtype: to run in.
    """
    definition: Any = nnx.split(owner)[0]
    for part, own in slices(arrays):
        wide = {leaf: jnp.asarray(array.astype(DTYPES[dtype])) for leaf, array in own.items()}
        yield part, merge(definition, wide)


def is_large_product(pair: Pair, runner: TeacherForcedRunner, reference: Any) -> bool:
    """Whether a pair is large heads of known classes, whose rows do not meet.

    Args:
        pair: the modules.
        runner: knows their calls.
        reference: the reference's module.
    """
    owner, method = jax_modules.resolve(runner.module, pair.candidate[0])
    calls = runner.matched_calls[pair.candidate]
    if METHODS.get(type(owner)) != method or len(calls) != 1 or runner.padding:
        return False
    (matched,) = calls
    given, made = matched.reference[0], matched.candidate[0]
    shape = owner.kernel.shape[::-1] if isinstance(owner, Linear) else owner.embedding.shape
    return (
        math.prod(shape) > LARGE
        and pair.packing is ONE_TO_ONE
        and len(pair.candidate) == len(pair.reference) == matched.repeats == 1
        and _is_plain(reference)
        and tuple(reference.weight.shape) == tuple(shape)
        and len(given.inputs) == len(given.outputs) == 1
        and made.outputs[0].shape == given.outputs[0].shape
    )


def _is_plain(module: Any) -> bool:
    """Whether a module of the reference is a linear layer, with no code of its own around it."""
    held = vars(module)
    has_code = "forward" in held or any("hooks" in name and held[name] for name in held)
    return type(module) is torch_trace.require_torch().nn.Linear and not has_code


def compare_held_product(
    pair: Pair, runner: TeacherForcedRunner, reference: Any
) -> PairDifferences:
    """Compares a pair of large heads that are in memory, in another dtype than float64.

    Args:
        pair: the heads.
        runner: knows their call; its module has the reference's weights.
        reference: the reference's module.
    """
    owner = jax_modules.resolve(runner.module, pair.candidate[0])[0]
    arrays = {leaf: np.asarray(array) for leaf, array in jax_modules.parameters_of(owner).items()}

    def read() -> dict[str, np.ndarray]:
        return {name: torch_values.view(each) for name, each in reference.named_parameters()}

    def to_tensor(array: np.ndarray) -> Any:
        return torch_values.tensor(array).double()

    return compare_product(pair, runner, arrays, reference, read, to_tensor)


def compare_product(
    pair: Pair,
    runner: TeacherForcedRunner,
    arrays: Arrays,
    reference: Any,
    read: Callable[[], dict[str, np.ndarray]],
    to_tensor: Callable[[np.ndarray], Any],
) -> PairDifferences:
    """Compares a pair of large heads, isolated, on the reference's inputs.

    Args:
        pair: the heads.
        runner: knows their call.
        arrays: the reference's arrays in the candidate's layout, by name within the module.
        reference: the reference's module.
        read: returns its arrays, in PyTorch's layout.
        to_tensor: returns an array as a tensor in float64.
    """
    owner, method = jax_modules.resolve(runner.module, pair.candidate[0])
    name = pair.candidate[0].removesuffix(".attend")
    (matched,) = runner.matched_calls[pair.candidate]
    args, kwargs = refill(
        (matched.candidate[0].args, matched.candidate[0].kwargs), matched.inputs(0)
    )
    call = jax_trace.JaxCall(args, kwargs, 0)
    expected = matched.outputs(0)[0]
    assert expected is not None
    given = matched.reference[0]
    cotangent = None
    if runner.gradients is not None:
        random = random_of_call(pair.reference[0], 0)
        given.output_gradients = [random.uniform(-1, 1, given.outputs[0].shape)]
        given.input_gradients = [np.zeros(given.inputs[0].shape)]
        cotangent = matched.output_gradients(0)[0]
    judged = {name: Judgement() for name in ("its output", "input 0")}
    totals: dict[str, np.ndarray] = {}

    def outcomes(dtype: str) -> Iterator[tuple[slice, IsolatedOutcome]]:
        for part, own in candidate_slices(owner, arrays, dtype):
            pulled = None if cotangent is None else [cotangent[..., part]]
            yield part, IsolatedModule(own, method, call, {}, dtype).run(pulled)

    def label(leaf: str) -> str:
        full = f"{name}.{leaf}"
        return full.removeprefix(f"{pair.candidate[0]}.")

    def add_total(key: str, outcome: IsolatedOutcome) -> None:
        if outcome.input_gradients:
            gradient = outcome.input_gradients[0]
            totals[key] = totals[key] + gradient if key in totals else gradient

    exact = zip(outcomes("float64"), slices(read()), strict=True)
    for (part, outcome), (_, own) in exact:
        judged["its output"].add(outcome.outputs[0], expected[..., part])
        add_total("float64", outcome)
        if cotangent is not None:
            wanted = _reference_gradients(matched, reference, part, own, to_tensor)
            for leaf, gradient in outcome.parameter_gradients.items():
                judgement = judged.setdefault(label(leaf), Judgement())
                judgement.add(gradient, wanted[leaf])
    gradients = matched.input_gradients()
    given.output_gradients, given.input_gradients = [], []
    if not gradients or gradients[0] is None:
        del judged["input 0"]
    else:
        judged["input 0"].add(totals["float64"], gradients[0])
    if any(judgement.needs_float32 for judgement in judged.values()):
        both = zip(outcomes("float64"), outcomes("float32"), strict=True)
        for (_, outcome), (_, low) in both:
            judged["its output"].add_float32(low.outputs[0], outcome.outputs[0])
            add_total("float32", low)
            for leaf, gradient in low.parameter_gradients.items():
                judged[label(leaf)].add_float32(gradient, outcome.parameter_gradients[leaf])
        if "input 0" in judged:
            judged["input 0"].add_float32(totals["float32"], totals["float64"])
    found: dict[str, Difference] = {name: each.difference for name, each in judged.items()}
    return PairDifferences([("its output", found.pop("its output"))], found)


def _reference_gradients(
    matched: MatchedCall,
    module: Any,
    part: slice,
    arrays: Arrays,
    to_tensor: Callable[[np.ndarray], Any],
) -> dict[str, np.ndarray]:
    """Returns the reference's gradients of a slice, under the candidate's names and layout.

    What the slice adds to the gradient of the input is added in the call.
    """
    torch = torch_trace.require_torch()
    call, path = matched.reference[0], matched.pair.reference[0]
    gradient = call.output_gradients[0]
    assert gradient is not None
    with torch.enable_grad():
        x = torch.from_numpy(np.array(call.inputs[0])).requires_grad_()
        result, own = run_slice(module, method_of(path), arrays, to_tensor, x)
    of_input, *pulled = torch.autograd.grad(
        result, [x, *own.values()], torch.from_numpy(np.array(gradient[..., part]))
    )
    call.input_gradients[0] += of_input.numpy()
    found = {name: each.numpy() for name, each in zip(own, pulled, strict=True)}
    weight = found.pop("weight")
    return {**found, "kernel": weight.T, "embedding": weight}
