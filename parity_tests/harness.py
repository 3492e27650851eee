"""Runs one component in JAX and in torch, from equal weights and inputs.

Each run gives a dict of arrays: ``output``, ``weights.<layer>``, ``input.<argument>`` and
``parameter.<torch_ref name>``, the last two being gradients of Σ output · c with a fixed random c.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from flax import nnx

import jaxformer.layers
import torch_ref.layers
from jaxformer.parameters import get_parameters, merge, set_parameters, split
from jaxformer.porting import export_arrays
from parity_tests.verdict import Rounding, judge_rounding

Arrays = dict[str, np.ndarray]
STDS = (0.02, 1.0, 20.0)
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
FLOAT64 = np.dtype(np.float64)


class Side:
    """One side of the mirror: ``side.attention.MultiHeadAttention(…, **side.init)``."""

    def __init__(self, package: str):
        self.package = package

    def __getattr__(self, module: str) -> Any:
        return importlib.import_module(f"{self.package}.{module}")

    @property
    def init(self) -> dict[str, Any]:
        """The keyword that only the JAX side has."""
        return {"rngs": nnx.Rngs(0)} if self.package == "jaxformer" else {}


JAX, TORCH = Side("jaxformer"), Side("torch_ref")


@dataclasses.dataclass(frozen=True)
class Case:
    """A component with one choice of settings: one row of the table.

    Attributes:
        name: ``component/variant``.
        build: makes the module, or names the function, on the side that it is given.
        inputs: keyword arguments drawn from a generator; float arrays have std 1, are scaled by
            the harness and get gradients.
        method: which method is called.
        weights: whether it can return attention weights.
        first: whether the output is the first of several results.
        dropout: whether it has a ``Dropout`` whose rate is above zero.
    """

    name: str
    build: Callable[[Side], Any]
    inputs: Callable[[np.random.Generator], Arrays]
    method: str = "__call__"
    weights: bool = False
    first: bool = False
    dropout: bool = False

    def stds(self) -> tuple[float, ...]:
        """Returns the standard deviations of inputs to run it with; token ids have none."""
        return STDS if floats(self.arguments(1.0)) else (1.0,)

    @property
    def component(self) -> str:
        """The file of the mirror that it belongs to."""
        return self.name.partition("/")[0]

    def arguments(self, std: float, draw: int = 0) -> Arrays:
        """Returns the inputs with their floats at the given standard deviation, float64."""
        drawn = self.inputs(np.random.default_rng((7, draw)))
        return {
            name: value * std if name in floats(drawn) else value for name, value in drawn.items()
        }


def floats(arguments: Arrays) -> list[str]:
    """Returns the names of the arguments that have a gradient."""
    return [
        name
        for name, value in arguments.items()
        if isinstance(value, np.ndarray) and value.dtype.kind not in "iub"
    ]


class Pair:
    """A case built on both sides with equal, perturbed parameters.

    Args:
        case: the row.
        training: with dropout on, its masks recorded on the JAX side and injected into both.
    """

    def __init__(self, case: Case, training: bool = False):
        self.case = case
        self.training = training
        self.module = case.build(JAX)
        self.twin = case.build(TORCH)
        self.is_module = isinstance(self.module, nnx.Module)
        self.parameters = perturbed(self.module) if self.is_module else {}
        if self.is_module:
            (self.module.train if training else self.module.eval)()
            self.twin.train(training)
            set_parameters(self.module, self.parameters)
            self.definition, _ = split(self.module)
        self.masks = self._record_masks() if training and self.is_module else {}

    def _record_masks(self) -> Arrays:
        """Records the keep-masks of one run, which both sides then use."""

        def run(parameters: Arrays) -> dict[str, Any]:
            module = merge(self.definition, parameters)
            places = jaxformer.layers.dropout_modules(module)
            jaxformer.layers.seed_dropout(module, jax.random.key(3))
            for place in places.values():
                place.recording = True
            self._call_jax(module, self.case.arguments(1.0))
            return {p: d.last_keep for p, d in places.items() if d.last_keep is not None}

        # Jitted, one small program is compiled: nothing of the run but the masks is in it.
        masks = {path: np.asarray(keep) for path, keep in jax.jit(run)(self.parameters).items()}
        if masks:
            torch_ref.layers.inject_keep_masks(
                self.twin, {path: torch.from_numpy(mask.copy()) for path, mask in masks.items()}
            )
        return masks

    def _call_jax(self, module: Any, arguments: Any, **more: Any) -> Any:
        return self._output(call(module, self.case.method, arguments, more))

    def _output(self, result: Any) -> Any:
        return result[0] if self.case.first else result

    def _run_jax(self, parameters: Any, arguments: Any) -> Any:
        """Returns the output of the JAX side from given parameters and arguments."""
        module = self.module
        if self.is_module:
            module = merge(self.definition, parameters)
            jaxformer.layers.inject_keep_masks(module, self.masks)
        # Plain numbers in a call are settings: shapes may depend on them.
        given = {n: v if isinstance(v, int) else arguments[n] for n, v in self._usual.items()}
        return self._call_jax(module, given)

    @functools.cached_property
    def _usual(self) -> Arrays:
        """The inputs in the order of the call."""
        return self.case.arguments(1.0)

    @functools.cached_property
    def _jax_output(self) -> Callable[..., Any]:
        return jax.jit(
            lambda parameters, variable, fixed: self._run_jax(parameters, {**variable, **fixed})
        )

    @functools.cached_property
    def _jax_gradients(self) -> Callable[..., Any]:
        def run(parameters: Any, variable: Any, fixed: Any, wide: Any) -> Any:
            def loss(parameters: Any, variable: Any) -> Any:
                output = self._run_jax(parameters, {**variable, **fixed})
                cotangent = jnp.asarray(cotangent_of(output.shape), wide)
                return jnp.sum(output.astype(wide) * cotangent), output

            (_, output), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
                parameters, variable
            )
            return output, gradients

        return jax.jit(run, static_argnums=3)

    def jax(
        self,
        std: float,
        dtype: np.dtype = FLOAT64,
        rounded: np.dtype = FLOAT64,
        draw: int = 0,
    ) -> Arrays:
        """Returns output and gradients of the JAX side, jitted, computed in ``dtype``.

        Parameters and inputs are first rounded to ``rounded``.
        """
        given = self._given_to_jax(std, rounded, dtype, draw)
        wide = jnp.promote_types(dtype, jnp.float32)
        output, (by_parameter, by_input) = self._jax_gradients(*given, wide)
        return {
            "output": widened(output),
            **{f"input.{name}": widened(g) for name, g in by_input.items()},
            **{f"parameter.{n}": widened(g) for n, g in export_arrays(by_parameter).items()},
        }

    def jax_output(
        self,
        std: float,
        dtype: np.dtype = FLOAT64,
        rounded: np.dtype = FLOAT64,
        draw: int = 0,
    ) -> Arrays:
        """Returns the output that ``jax`` returns, from a program without gradients."""
        given = self._given_to_jax(std, rounded, dtype, draw)
        return {"output": widened(self._jax_output(*given))}

    def _given_to_jax(
        self, std: float, rounded: np.dtype, dtype: np.dtype, draw: int
    ) -> tuple[Any, Arrays, Arrays]:
        """Returns parameters, inputs that have a gradient, and other arrays."""
        parameters, arguments = self._rounded(std, rounded, dtype, draw)
        variable = {name: arguments[name] for name in floats(arguments)}
        fixed = {n: v for n, v in arguments.items() if n not in variable and not isinstance(v, int)}
        return parameters, variable, fixed

    def jax_eagerly(self, std: float) -> Arrays:
        """Returns output and weights of the JAX side in float64, without ``jax.jit``."""
        parameters, arguments = self._rounded(std, FLOAT64, FLOAT64)
        if self.is_module:
            set_parameters(self.module, parameters)
            jaxformer.layers.inject_keep_masks(self.module, self.masks)
        arguments = {n: v if isinstance(v, int) else jnp.asarray(v) for n, v in arguments.items()}
        more = {"return_weights": True} if self.case.weights else {}
        return named_outputs(self._call_jax(self.module, arguments, **more))

    def torch(
        self,
        std: float,
        dtype: np.dtype = FLOAT64,
        rounded: np.dtype = FLOAT64,
        draw: int = 0,
        return_weights: bool = False,
    ) -> Arrays:
        """Returns output and gradients of the torch side, or output and weights."""
        parameters, arguments = self._rounded(std, rounded, FLOAT64, draw)
        torch_dtype = getattr(torch, dtype.name)
        tensors = {
            name: value if isinstance(value, int) else torch.from_numpy(np.array(value))
            for name, value in arguments.items()
        }
        for name in floats(arguments):
            tensors[name] = tensors[name].to(torch_dtype)
        leaves = [tensors[n].requires_grad_() for n in floats(arguments)]
        if self.is_module:
            self.twin.to(torch.float64)
            state = {n: torch.from_numpy(v.copy()) for n, v in export_arrays(parameters).items()}
            self.twin.load_state_dict(state, strict=True)
            self.twin.to(torch_dtype)
        if return_weights:
            more = {"return_weights": True} if self.case.weights else {}
            return named_outputs(self._output(call(self.twin, self.case.method, tensors, more)))
        output = self._output(call(self.twin, self.case.method, tensors, {}))
        wide = torch.promote_types(torch_dtype, torch.float32)
        cotangent = torch.from_numpy(cotangent_of(tuple(output.shape))).to(wide)
        names = [f"input.{name}" for name in floats(arguments)]
        if self.is_module:
            for name, parameter in self.twin.named_parameters():
                names.append(f"parameter.{name}")
                leaves.append(parameter)
        loss = torch.sum(output.to(wide) * cotangent)
        gradients = [None] * len(leaves)
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        return {
            "output": widened(output),
            **{
                name: np.zeros(tuple(leaf.shape)) if gradient is None else widened(gradient)
                for name, leaf, gradient in zip(names, leaves, gradients, strict=True)
            },
        }

    def _rounded(
        self, std: float, rounded: np.dtype, dtype: np.dtype, draw: int = 0
    ) -> tuple[Any, Any]:
        """Returns parameters and inputs rounded to ``rounded``, in ``dtype``."""
        arguments = self.case.arguments(std, draw)
        for name in floats(arguments):
            arguments[name] = arguments[name].astype(rounded).astype(dtype)
        parameters = {n: p.astype(rounded).astype(dtype) for n, p in self.parameters.items()}
        return parameters, arguments


def call(called: Any, method: str, arguments: Any, more: Any) -> Any:
    """Calls a module, its method, or a function: the first argument by place, the rest by name."""
    function = called if method == "__call__" else getattr(called, method)
    first, *rest = arguments
    return function(arguments[first], **{name: arguments[name] for name in rest}, **more)


def perturbed(module: nnx.Module, std: float = 0.1) -> Arrays:
    """Returns the module's parameters, moved away from ones and zeros, which hide swaps."""
    random = np.random.default_rng(11)
    return {
        name: np.asarray(p, np.float64) + std * random.standard_normal(p.shape)
        for name, p in sorted(get_parameters(module).items())
    }


@functools.lru_cache(maxsize=64)
def cotangent_of(shape: tuple[int, ...]) -> np.ndarray:
    """Returns the fixed random array that outputs are multiplied by before they are summed."""
    return np.random.default_rng(13).standard_normal(shape)


def named_outputs(result: Any) -> Arrays:
    """Returns an output by name, with the weights of one attention or of each layer if any."""
    if not isinstance(result, tuple):
        return {"output": widened(result)}
    output, weights = result
    weights = weights if isinstance(weights, list) else [weights]
    return {
        "output": widened(output),
        **{f"weights.{layer}": widened(w) for layer, w in enumerate(weights)},
    }


def widened(array: Any) -> np.ndarray:
    """Returns the values as a float64 numpy array."""
    if isinstance(array, torch.Tensor):
        return array.detach().to(torch.float64).numpy()
    return np.asarray(array).astype(np.float64)


def rounding_draws(
    pair: Pair, std: float, dtype: np.dtype, draws: int = 8
) -> list[tuple[Arrays, Arrays, Arrays]]:
    """Returns JAX's, torch's and the float64 result, for several draws of the inputs."""
    return [
        (
            pair.jax(std, dtype, dtype, draw),
            pair.torch(std, dtype, dtype, draw),
            pair.torch(std, FLOAT64, dtype, draw),
        )
        for draw in range(draws)
    ]


def output_draws(
    pair: Pair, std: float, dtype: np.dtype, draws: int = 8
) -> list[tuple[Arrays, Arrays, Arrays]]:
    """Returns the outputs of ``rounding_draws``."""
    return [
        (
            pair.jax_output(std, dtype, dtype, draw),
            {"output": pair.torch(std, dtype, dtype, draw)["output"]},
            {"output": pair.torch(std, FLOAT64, dtype, draw)["output"]},
        )
        for draw in range(draws)
    ]


def judge_case_rounding(pair: Pair, std: float, dtype: np.dtype) -> dict[str, Rounding]:
    """Returns ``judge_rounding`` over 8 draws, or over 64 if 8 show a difference.

    The logarithm of one draw's ratio has a standard deviation of up to 1.2 (attention at std 20),
    so that the geometric mean of 8 is off by a factor of 1.5 now and then, that of 64 by 1.16.

    Raises:
        AssertionError: a ratio is above 2.
    """
    try:
        return judge_rounding(rounding_draws(pair, std, dtype), dtype)
    except AssertionError:
        return judge_rounding(rounding_draws(pair, std, dtype, draws=64), dtype)
