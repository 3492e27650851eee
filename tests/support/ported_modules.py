"""What the tests of dialects share: a PyTorch module and what it became here, run side by side."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from flax import nnx

from jaxformer.layers import dropout_modules
from jaxformer.parameters import get_parameters, join_path, merge, split
from jaxformer.porting.api import export_plan, from_torch, to_torch
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.transfer import export_tensors
from parity_tests.harness import cotangent_of, widened

Arrays = dict[str, np.ndarray]
DTYPES = ("float32", "bfloat16", "float16", "float64")


def perturb(module: torch.nn.Module, seed: int = 11) -> torch.nn.Module:
    """Moves every parameter away from its initial value, in float64."""
    random = np.random.default_rng(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.from_numpy(0.1 * random.standard_normal(parameter.shape))
    return module


def flatten(result: Any) -> list[Any]:
    """An output and the weights of an attention or of each layer, one after another."""
    if isinstance(result, tuple | list):
        return [leaf for part in result for leaf in flatten(part)]
    return [result]


def run_source(module: Any, call: Callable[..., Any], inputs: Arrays) -> Arrays:
    """Output, weights, and the gradients of float inputs and of parameters, by their names."""
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in inputs.items()}
    leaves = {f"input.{n}": t.requires_grad_() for n, t in tensors.items() if t.is_floating_point()}
    leaves |= {f"parameter.{name}": p for name, p in module.named_parameters()}
    output, *weights = flatten(call(module, **tensors))
    result = named(output, weights)
    if output.requires_grad:
        loss = torch.sum(output * torch.from_numpy(cotangent_of(tuple(output.shape))))
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        result |= {name: widened(g) for name, g in zip(leaves, gradients, strict=True)}
    return result


def run_target(module: Any, call: Callable[..., Any], inputs: Arrays, dialect: str) -> Arrays:
    """The same of a jaxformer module, gradients of parameters by the dialect's names."""
    definition, parameters = split(module)
    floats = {n: jnp.asarray(a) for n, a in inputs.items() if a.dtype.kind == "f"}

    def total(parameters: Any, floats: Any) -> Any:
        output, *weights = flatten(call(merge(definition, parameters), **{**inputs, **floats}))
        return jnp.sum(output * cotangent_of(output.shape)), (output, weights)

    # As one program: odd shapes would compile every operation.
    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, (output, weights)), (by_parameter, by_input) = run(parameters, floats)
    plan = export_plan(module, dialect)
    gradients = export_tensors(
        plan.links, {name: StoredTensor.of(np.asarray(g)) for name, g in by_parameter.items()}
    )
    return (
        named(output, weights)
        | {f"input.{name}": widened(g) for name, g in by_input.items()}
        | {f"parameter.{name}": widened(g.read()) for name, g in gradients.items()}
    )


def named(output: Any, weights: list[Any]) -> Arrays:
    found = {f"weights.{number}": widened(w) for number, w in enumerate(weights)}
    return {"output": widened(output), **found}


def state_of(module: torch.nn.Module) -> Arrays:
    """A state dict in numpy, bfloat16 by its bits."""
    return {name: to_numpy(tensor) for name, tensor in module.state_dict().items()}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def same_bits(found: Arrays, expected: Arrays) -> None:
    """The same names, and under each the same shape, dtype and bits, C-contiguous."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, array in expected.items():
        assert found[name].flags.c_contiguous, name
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        assert found[name].tobytes() == array.tobytes(), name


def round_trip(module: torch.nn.Module, dialect: str, dtype: str) -> Arrays:
    """Demands that a module comes back bit for bit, and returns what came back."""
    expected = state_of(module.to(getattr(torch, dtype)))
    target = from_torch(module, dialect)
    for name, parameter in get_parameters(target).items():
        assert parameter.dtype.name == dtype, name
    same_bits(to_torch(target), expected)
    back = to_torch(target, dialect)
    same_bits(back, expected)
    return back


def settings_of(module: Any) -> dict[str, Any]:
    """All settings of a jaxformer module and its submodules, by path: classes, numbers, rates."""
    settings: dict[str, Any] = {}
    for path, node in nnx.iter_modules(module):
        at = join_path(path)
        own = [c for c in type(node).__mro__ if not c.__module__.startswith("jaxformer.porting")]
        settings[f"{at}:class"] = own[0].__name__
        for name, value in vars(node).items():
            if isinstance(value, int | float | str | tuple | None) and name not in SIGNATURES:
                settings[f"{at}:{name}"] = value
    return settings


# What only modules have that are called as those of a dialect, and what a mode sets.
SIGNATURES = {"context_length", "batch_first", "deterministic"}


def is_training(module: Any) -> bool:
    """Whether every place of dropout is in training mode; all must be in one mode."""
    modes = {not place.deterministic for place in dropout_modules(module).values()}
    assert len(modes) <= 1
    return modes.pop() if modes else False
