"""The reference of a comparison: its port, its modules, and its passes."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxformer.errors import JaxformerError, UsageError
from jaxformer.parity.matching.pairs import Pair, pair_by_map, pair_modules
from jaxformer.parity.matching.positions import computes_tables
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.torch_run import TorchRun, run_torch
from jaxformer.parity.recording.reference_modules import modules_of
from jaxformer.parity.recording.torch_values import as_numpy, everything_in_float64, require_torch
from jaxformer.parity.recording.twins import join_twins
from jaxformer.parity.recording.whole_models import call_module
from jaxformer.porting.api import build, import_plan
from jaxformer.porting.mapping.plans import Plan

# Calls a model, given it and its inputs.
Caller = Callable[[Any, Sequence[Any]], Any]


class ReferenceRun:
    """The reference of a comparison: its port, its modules, and how it is run.

    Use it under ``jax.enable_x64(True)``.

    Args:
        torch_module: the reference.
        inputs: its positional arguments.
        dialect: the name of its dialect; default found by its class.
        names: candidate paths to reference paths, instead of a dialect, to show one pair of them.
        backward: whether to compare gradients too.
        call: how to call the reference.
        config: the candidate; its settings are used where the reference's own are unsupported.
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
        force: bool = False,
    ):
        require_torch()
        self.module = torch_module
        self.names = names
        self.backward = backward
        self.inputs = [as_numpy(x) for x in inputs]
        self.call: Caller = call or (lambda module, given: call_module(module, *given))
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
        return modules_of(self.module)

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
        # Models cast to float32 inside: norms, softmax, the numbers that they scale by.
        with everything_in_float64():
            return run_torch(
                self.module, self.inputs, {}, self.backward, buffers, self.call,
                before_forgetting, {*watched, *tables},
            )  # fmt: skip

    @property
    def size(self) -> int:
        """How many parameters the reference has."""
        return sum(parameter.numel() for parameter in self.module.parameters())
