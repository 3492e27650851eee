"""The reference of a comparison: its port, its modules, and its passes."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxformer.errors import JaxformerError, UsageError
from jaxformer.parity.matching.pairs import Pair, pair_by_map, pair_modules
from jaxformer.parity.matching.positions import computes_tables
from jaxformer.parity.recording.calls import torch_trace
from jaxformer.parity.recording.memory import release
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.torch_run import TorchRun, run_torch
from jaxformer.parity.recording.twins import join_twins
from jaxformer.parity.recording.wide_parameters import wide_parameters, with_shared_parameters
from jaxformer.porting.api import build, import_plan
from jaxformer.porting.mapping.plans import Plan

# Calls a model, given it and its inputs.
Caller = Callable[[Any, Sequence[Any]], Any]


class ReferenceRun:
    """The reference, run once, for comparison with any number of candidates.

    Use it under ``jax.enable_x64(True)``.

    Args:
        torch_module: the reference.
        inputs: its positional arguments.
        dialect: the name of its dialect; default found by its class.
        names: candidate paths to reference paths, instead of a dialect, to show one pair of them.
        backward: whether to compare gradients too.
        call: how to call the reference.
        config: the candidate; its settings are used where the reference's own are unsupported.
        is_single_use: whether it serves one comparison, which may free what was recorded.
        force: whether the dialect may contradict the reference's config.

    Attributes:
        plan: how it is ported; None with ``names``.
        unsupported_settings: why its own settings make no JAX model, "" if they do.
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
        is_single_use: bool = False,
        force: bool = False,
    ):
        self.is_single_use = is_single_use
        torch_trace.require_torch()
        self.module = torch_module
        self.names = names
        self.backward = backward
        self.inputs = [torch_trace.as_numpy(x) for x in inputs]
        self.call: Caller = call or (lambda module, given: torch_trace.call_module(module, *given))
        self.unsupported_settings = ""
        self.plan: Plan | None = None
        if names is None:
            self.plan = self._plan(dialect, config, force)
            self.module = join_twins(torch_module, self.plan.module_mapping.aliases)

    def _plan(self, dialect: str | None, config: Any, force: bool) -> Plan:
        try:
            return import_plan(self.module, dialect, force=force)
        except UsageError as error:
            if config is None:
                raise
            # If one layer differs from the others, no JAX model can be made of the reference, but
            # the candidate can still be compared with it.
            try:
                plan = import_plan(self.module, dialect, config=config, force=force)
            except JaxformerError:
                raise error from None
            self.unsupported_settings = str(error)
            return plan

    def port(self) -> Any:
        """Returns the JAX module that ``from_torch`` makes of the reference."""
        if self.plan is None:
            raise UsageError("a map of names does not make a JAX module")
        return build(self.plan)

    @functools.cached_property
    def modules(self) -> dict[str, Any]:
        """The reference's modules by path."""
        return torch_trace.modules_of(self.module)

    def pairs_with(self, jax_module: Any) -> list[Pair]:
        """Returns the pairs of modules of a candidate and the reference."""
        if self.plan is None:
            return pair_by_map(jax_module, self.names or {}, self.modules)
        return pair_modules(jax_module, self.plan.module_mapping, self.plan.links, self.modules)

    def record(
        self, watched: Collection[str], before_forgetting: Callable[[Value], None]
    ) -> TorchRun:
        """Runs it in float64, operator by operator.

        Args:
            watched: paths of the modules whose calls are recorded, beside those of tables.
            before_forgetting: see ``TorchRun``.
        """
        tables = {path for path, module in self.modules.items() if computes_tables(module)}
        ported = {name for link in self.plan.links for name in link.source} if self.plan else set()
        buffers = [name for name, _ in self.module.named_buffers() if name in ported]
        return run_torch(
            self.module, self.inputs, {}, self.backward, buffers, self.call, before_forgetting,
            {*watched, *tables},
        )  # fmt: skip

    @functools.cached_property
    def wide(self) -> Any:
        """The module to be run in float64, from the bits of its weights."""
        return with_shared_parameters(self.module)

    @functools.cached_property
    def trace(self) -> torch_trace.Trace:
        """The pass in float64."""
        inputs = torch_trace.in_dtype(self.inputs, "float64")
        with torch_trace.everything_in_float64(), wide_parameters(self.wide):
            made = torch_trace.run(self.wide, inputs, call=self.call, keep=self._is_recorded)
        release(self.size)
        return made

    @property
    def size(self) -> int:
        """How many parameters the reference has."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def low_trace(self, dtype: str) -> torch_trace.Trace:
        """Returns the pass in another dtype, forward only."""
        # Of the candidate's own pass, which is over.
        release(self.size)
        module = torch_trace.in_narrow(self.module, dtype)
        inputs = torch_trace.in_dtype(self.inputs, dtype)
        low = torch_trace.run(module, inputs, call=self.call, keep=self._is_recorded, weights=False)
        return dataclasses.replace(low, padding=self.trace.padding)

    @functools.cached_property
    def _recorded(self) -> set[str]:
        if self.plan is None:
            return {"", *(self.names or {}).values()}
        tables = {path for path, module in self.modules.items() if computes_tables(module)}
        pairs = self.pairs_with(self.plan.module)
        return tables | {path for pair in pairs for path in pair.reference}

    def _is_recorded(self, path: str) -> bool:
        return path in self._recorded
