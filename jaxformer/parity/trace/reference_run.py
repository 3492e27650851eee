"""Their side of a comparison: what it is here, and its passes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.errors import JaxformerError, UsageError
from jaxformer.parity.matching.modules import Pair, pair_by_map, pair_modules
from jaxformer.parity.trace import torch_trace as torch_trace
from jaxformer.parity.trace.memory import release
from jaxformer.porting.api import build, import_plan
from jaxformer.porting.mapping.plans import Plan

# How a model is called: given it and its inputs.
Caller = Callable[[Any, Sequence[Any]], Any]


class ReferenceRun:
    """Their side, run once, that any number of modules of ours can be compared with.

    To be used under ``jax.enable_x64(True)``. Arguments as in ``compare``.

    Args:
        torch_module: theirs.
        inputs: of theirs.
        dialect: whose classes theirs are.
        names: paths of modules of ours to paths of theirs, instead of a dialect.
        backward: whether to compare gradients too.
        call: how theirs is called.
        config: our module; read where their settings cannot be those of any of ours.
        once: whether it serves one comparison, and may forget gradients that have been compared.
    """

    def __init__(
        self,
        torch_module: Any,
        inputs: Sequence[Any],
        *,
        dialect: str | None = None,
        names: Mapping[str, str] | None = None,
        backward: bool = True,
        call: Caller | None = None,
        config: Any = None,
        once: bool = False,
    ):
        self.once = once
        torch_trace.require_torch()
        self.module = torch_module
        self.names = names
        self.backward = backward
        self.inputs = [torch_trace.as_numpy(x) for x in inputs]
        self.call: Caller = call or (lambda module, given: module(*given))
        # What is said of their settings, where they are not those of any model of ours.
        self.source_settings = ""
        self.plan: Plan | None = None
        # How many outputs ours has.
        self.count_outputs: Callable[[], int] = lambda: 1
        if names is None:
            self.plan = self._plan(dialect, config)

    def _plan(self, dialect: str | None, config: Any) -> Plan:
        try:
            return import_plan(self.module, dialect)
        except UsageError as error:
            if config is None:
                raise
            # A layer of theirs that is not as the others makes no model of ours, but there is one
            # to compare it with.
            try:
                plan = import_plan(self.module, dialect, config=config)
            except JaxformerError:
                raise error from None
            self.source_settings = str(error)
            return plan

    def ported(self) -> Any:
        """The module of ours that theirs makes."""
        if self.plan is None:
            raise UsageError("give the JAX module: a map of names does not make one")
        return build(self.plan)

    @functools.cached_property
    def modules(self) -> dict[str, Any]:
        """Their modules by path."""
        return torch_trace.modules_of(self.module)

    def pairs_with(self, jax_module: Any) -> list[Pair]:
        """Which modules of ours are which of theirs."""
        if self.plan is None:
            return pair_by_map(jax_module, self.names or {}, self.modules)
        return pair_modules(jax_module, self.plan.counterpart, self.plan.links, self.modules)

    @functools.cached_property
    def trace(self) -> torch_trace.Trace:
        """Their pass in float64, from the bits of their weights."""
        module = torch_trace.in_float64(self.module)
        rng = np.random.default_rng(0)

        def pull(outputs: list[np.ndarray]) -> list[np.ndarray]:
            # A gradient in every direction, so that nothing can hide.
            # What ours does not return is not asked for.
            asked = outputs if len(outputs) == 1 else outputs[: max(1, self.count_outputs())]
            return [rng.standard_normal(a.shape) for a in asked]

        with torch_trace.everything_in_float64():
            trace = torch_trace.run(
                module, torch_trace.in_dtype(self.inputs, "float64"), call=self.call,
                cotangents=pull if self.backward else None, keep=self._is_wanted,
                again=lambda: torch_trace.in_float64(self.module),
            )  # fmt: skip
        del module
        release(self.size)
        return trace

    @property
    def size(self) -> int:
        """How many parameters theirs has."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def low_trace(self, dtype: str) -> torch_trace.Trace:
        """Their pass as it is used."""
        module = torch_trace.in_narrow(self.module, dtype)
        inputs = torch_trace.in_dtype(self.inputs, dtype)
        low = torch_trace.run(module, inputs, call=self.call, keep=self._is_wanted, weights=False)
        return dataclasses.replace(low, padding=self.trace.padding)

    @functools.cached_property
    def _wanted(self) -> set[str]:
        if self.plan is None:
            return {"", *(self.names or {}).values()}
        tables = {p for p, m in self.modules.items() if "Rotary" in type(m).__name__}
        pairs = self.pairs_with(self.plan.module)
        return tables | {path for pair in pairs for path in pair.reference}

    def _is_wanted(self, path: str) -> bool:
        return path in self._wanted
