"""A JAX function, evaluated operator by operator with every float in float64.

The function is traced to a jaxpr, so it does not matter which framework wrote it. Loops are
unrolled and calls are inlined. A cast to a narrower float is left out, so that what remains of a
difference is no rounding. Arrays that were computed before the call, such as tables in float32,
stay as they are.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxformer.errors import UsageError
from jaxformer.parity.recording.jax_values import (
    in_float64,
    is_float,
    is_numeric,
    leaf_names,
    on_host,
)
from jaxformer.parity.recording.operators.candidates import Candidate
from jaxformer.parity.recording.operators.equations import (
    function_of,
    function_with_rounding,
    inlined,
    is_opaque,
    literal,
)
from jaxformer.parity.recording.operators.evaluation import interpret
from jaxformer.parity.recording.operators.graph import LARGE, Value
from jaxformer.parity.recording.operators.module_marks import Mark, module_of_scope
from jaxformer.parity.recording.operators.sources import (
    caller_of,
    is_users_function,
    source_inside,
    source_of,
)
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.recording.operators.tracing import narrow_casts, rules, stopping, stops, trace


class JaxRun:
    """One run of a candidate, forward and, where it can be differentiated, backward.

    Args:
        candidate: the model.
        args: positional arguments, numpy arrays.
        kwargs: named arguments: arrays, nested ones too, are inputs; all else is passed on.
        tape: what the run is recorded on.
        known: returns the arrays to use in place of some parameters, by path, in float64.
        backward: whether to prepare the backward pass.
        as_written: whether narrower floats are kept, and marks are operators.
        chosen: of modules that choose, by path, call by call: the integers that the rest of the
            run gets instead, by place. With other ones a loop would take other steps.

    Attributes:
        tape: the same.
        no_gradients: why there is no backward pass; "" if there is one.
        marks: the values that have a mark, in the order of the run; of frameworks whose modules are
            known.
        cotangents: the same of the backward pass.
        differentiated: the marks on values that gradients depend on.

    Raises:
        UsageError: a positional argument holds what is no number.
    """

    def __init__(
        self,
        candidate: Candidate,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tape: Tape,
        known: Mapping[str, Callable[[], np.ndarray]],
        backward: bool = True,
        as_written: bool = False,
        chosen: Mapping[str, Sequence[Sequence[np.ndarray]]] | None = None,
    ):
        for place, value in enumerate(args):
            if not all(map(is_numeric, jax.tree.leaves(value))):
                raise UsageError(
                    f"the input {place} of the candidate holds what is no number: give it by name, "
                    "in a dict of inputs"
                )
        call, given = candidate.with_inputs(args, kwargs)
        self.tape = tape
        self.marks: list[tuple[Mark, Value]] = []
        self.cotangents: list[tuple[Mark, Value]] = []
        self._recorder = _Recorder(tape, self.marks, as_written, chosen or {})
        self._traced = trace(call, given, backward)
        self.no_gradients = self._traced.no_gradients
        leaves = jax.tree.leaves(given)
        values = []
        with jax.enable_x64(True):
            for name, leaf in zip(leaf_names(given), leaves, strict=True):
                side, _, rest = name.partition(".")
                is_parameter = side == "0" and rest not in candidate.caches
                kind = "parameter" if is_parameter else "input"
                read: Callable[[], Any] = partial(_on_host_in_float64, leaf)
                if is_parameter:
                    read = known.get(rest, read)
                value = tape.add(read(), kind, rest)
                # A large parameter is made float64 when it is read.
                if is_parameter and value.nbytes >= LARGE and not value.stands_for_another:
                    value.stand_for(read, tape.recent)
                values.append(value)
            self._differentiated = [
                v for v, leaf in zip(values, leaves, strict=True) if is_float(leaf)
            ]
            jaxpr = self._traced.forward
            made = self._recorder.run(jaxpr.jaxpr, _constants(tape, jaxpr.consts), values, "", "")
        self.differentiated = next(
            (m.differentiated for m, _ in self.marks if m.differentiated), set()
        )
        names, choices = self._traced.names, self._traced.choices
        count = len(names)
        tape.outputs, tape.output_names = made[:count], list(names)
        tape.choices = dict(zip(choices, made[count:], strict=False))
        self._residuals = made[count + len(choices) :]

    def backward(self, cotangents: Mapping[int, np.ndarray]) -> dict[int, Value]:
        """Records the backward pass.

        Args:
            cotangents: of outputs, by their place in ``tape.outputs``; the others have none.

        Returns:
            the gradient of each float parameter and input, by the index of its value.
        """
        jaxpr = self._traced.backward
        assert jaxpr is not None, self.no_gradients
        with jax.enable_x64(True):
            given = [
                self.tape.add(
                    cotangents.get(place, np.zeros(output.shape)),
                    "input",
                    f"cotangent {place}",
                )
                for place, output in enumerate(self.tape.outputs)
            ]
            self._recorder.gradients = set(map(id, jaxpr.jaxpr.outvars))
            # A checkpoint calls its modules once more.
            self._recorder.marks = self.cotangents
            gradients = self._recorder.run(
                jaxpr.jaxpr, _constants(self.tape, jaxpr.consts), [*self._residuals, *given], "", ""
            )
        return {v.index: g for v, g in zip(self._differentiated, gradients, strict=True)}

    def stops(self) -> list[str]:
        """Returns "path:line" of each place where the user's code stops gradients."""
        return list(dict.fromkeys(stops(self._traced.plain().jaxpr)))

    def stops_of_modules(self) -> list[tuple[str, str]]:
        """Returns the same, each after the path of the module that it is in, "" if not known."""
        return [
            (_module(equation, ""), source_of(equation))
            for equation in stopping(self._traced.plain().jaxpr)
        ]

    def rules(self) -> list[str]:
        """Returns "path:line" of each function of the user that says what a gradient is."""
        return list(dict.fromkeys(filter(None, rules(self._traced.plain().jaxpr))))

    def narrow_casts(self) -> dict[tuple[str, str], int]:
        """Returns "path:line" and dtype where floats are rounded to fewer bits than float32.

        Returns:
            how often each is so.
        """
        found = narrow_casts(self._traced.forward.jaxpr)
        bits = jnp.finfo(np.float32).nmant
        return dict(Counter(one for one in found if jnp.finfo(one[1]).nmant < bits))


def _on_host_in_float64(leaf: Any) -> Any:
    return on_host(in_float64(leaf))


def _constants(tape: Tape, arrays: Sequence[Any]) -> list[Value]:
    return [_constant(tape, in_float64(jnp.asarray(array))) for array in arrays]


def _constant(tape: Tape, array: Any) -> Value:
    return tape.add(on_host(array), "constant")


class _Recorder:
    """Evaluates jaxprs onto a tape.

    Attributes:
        gradients: identities of the variables that are gradients of parameters.
        marks: where values with a mark are put.
        as_written: see ``JaxRun``.
    """

    def __init__(
        self,
        tape: Tape,
        marks: list[tuple[Mark, Value]],
        as_written: bool,
        choices: Mapping[str, Sequence[Sequence[np.ndarray]]],
    ):
        self.tape, self.marks, self.as_written = tape, marks, as_written
        self._choices = choices
        self._chosen: Counter[tuple[str, int]] = Counter()
        self.gradients: set[int] = set()

    def run(
        self,
        jaxpr: Any,
        constants: Sequence[Value],
        arguments: Sequence[Value],
        source: str,
        module: str,
    ) -> list[Value]:
        """Evaluates a jaxpr and returns its outputs.

        Args:
            jaxpr: without its constants.
            constants: of the jaxpr.
            arguments: of the jaxpr.
            source: where it was called.
            module: whose call it was.
        """
        is_users = not source or is_users_function(jaxpr)

        def compute(equation: Any, values: list[Value]) -> Sequence[Value]:
            own = source_of(equation) if is_users else source_inside(equation, jaxpr)
            here = own or source
            inside = _module(equation, module)
            made = self._equation(equation, values, here, inside)
            for atom, value in zip(equation.outvars, made, strict=True):
                if id(atom) in self.gradients:
                    self.tape.forget_gradient(value)
            return made

        def read_literal(atom: Any) -> Value:
            return _constant(self.tape, literal(atom))

        return interpret(jaxpr, [*constants, *arguments], compute, read_literal)

    def _closed(
        self, closed: Any, values: Sequence[Value], source: str, module: str
    ) -> list[Value]:
        if not isinstance(closed, ClosedJaxpr):
            return self.run(closed, [], values, source, module)
        return self.run(closed.jaxpr, _constants(self.tape, closed.consts), values, source, module)

    def _equation(
        self, equation: Any, values: list[Value], source: str, module: str
    ) -> Sequence[Value]:
        name, params = equation.primitive.name, equation.params
        inner = inlined(equation)
        if inner is not None:
            return self._closed(inner, values, source, module)
        if name == "pvary":
            # It changes the type alone, of what differs between devices.
            return values
        mark = Mark.of(equation)
        if mark is not None:
            right = self._choice(mark, values[0])
            if right is not None:
                values = self.tape.record(
                    "mark", values, [right], lambda *arrays: [right], source=source,
                    module=mark.maker,
                )  # fmt: skip
            elif self.as_written:
                values = self.tape.record(
                    "mark", values, [values[0].data], lambda *arrays: list(arrays),
                    source=source, module=mark.maker,
                )  # fmt: skip
            self.marks += [(mark, value) for value in values]
            return values
        if name == "scan":
            return self._scan(params, values, source, module)
        if name == "while":
            return self._while(params, values, source, module)
        if name == "cond":
            branch = int(np.clip(values[0].data, 0, len(params["branches"]) - 1))
            return self._closed(params["branches"][branch], values[1:], source, module)
        run = (function_with_rounding(equation) if self.as_written else None) or function_of(
            equation
        )
        if is_opaque(equation):
            self.tape.opaque.add(name)
        made = run(*(value.data for value in values))
        caller = caller_of(equation) if source == source_of(equation) else ""
        numbers = {
            key: float(value)
            for key, value in params.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        return self.tape.record(
            name, values, [on_host(a) for a in made], run,
            source=source, caller=caller, module=module, numbers=numbers, terms=_terms(equation),
        )  # fmt: skip

    def _scan(
        self, params: Mapping[str, Any], values: list[Value], source: str, module: str
    ) -> list[Value]:
        constants, carry, rows = _parts_of_scan(params, values)
        count, length = len(carry), params["length"]
        stacked: list[list[Value]] = []
        for step in range(length)[:: -1 if params["reverse"] else 1]:
            one = [self._take(row, step, source, module) for row in rows]
            made = self._closed(params["jaxpr"], [*constants, *carry, *one], source, module)
            carry = made[:count]
            stacked.append(made[count:])
        if params["reverse"]:
            stacked.reverse()
        columns = [self._stack(list(c), source, module) for c in zip(*stacked, strict=True)]
        return [*carry, *columns]

    def _take(self, value: Value, step: int, source: str, module: str) -> Value:
        def take(array: Any) -> list[Any]:
            return [array[step]]

        made = take(value.data)
        return self.tape.record("index", [value], made, take, source=source, module=module)[0]

    def _stack(self, values: list[Value], source: str, module: str) -> Value:
        def stack(*arrays: Any) -> list[Any]:
            return [np.stack(arrays)]

        made = stack(*(value.data for value in values))
        return self.tape.record("stack", values, made, stack, source=source, module=module)[0]

    def _choice(self, mark: Mark, value: Value) -> np.ndarray | None:
        """Returns the integers that take the place of those that a module chose, if any do."""
        if mark.side != "chosen" or mark.path not in self._choices:
            return None
        number = self._chosen[mark.path, mark.place]
        self._chosen[mark.path, mark.place] += 1
        calls = self._choices[mark.path]
        right = calls[min(number, len(calls) - 1)][mark.place : mark.place + 1]
        is_same = bool(right) and right[0].shape == value.shape
        return right[0].astype(value.dtype) if is_same else None

    def _while(
        self, params: Mapping[str, Any], values: list[Value], source: str, module: str
    ) -> list[Value]:
        first, second = params["cond_nconsts"], params["body_nconsts"]
        condition, body = values[:first], values[first : first + second]
        carry = values[first + second :]
        while bool(
            self._closed(params["cond_jaxpr"], [*condition, *carry], source, module)[0].data
        ):
            carry = self._closed(params["body_jaxpr"], [*body, *carry], source, module)
        return carry


def _parts_of_scan(
    params: Mapping[str, Any], values: list[Value]
) -> tuple[list[Value], list[Value], list[Value]]:
    """Returns what enters a scan: constants, what is carried, and what each step has a row of."""
    if "ft_in" in params:  # since JAX 0.12
        constants, carry, rows = map(list, params["ft_in"].update(values).unpack())
        return constants, carry, rows
    fixed, count = params["num_consts"], params["num_carry"]
    return values[:fixed], values[fixed : fixed + count], values[fixed + count :]


def _module(equation: Any, around: str) -> str:
    """Returns the name of the module that an operator runs in: the names around it.

    JAX adds the names of transformations, like ``jvp``, which no reader has written.

    Args:
        equation: the operator.
        around: the name of the module that calls the equation's jaxpr.
    """
    stack = equation.source_info.name_stack.stack
    names = [each.name for each in stack if type(each).__name__ == "Scope"]
    marked = [path for path in map(module_of_scope, names) if path is not None]
    if marked:
        return marked[-1]
    return "/".join(filter(None, [around, *names]))


def _terms(equation: Any) -> int:
    """Returns how many terms the sums of products of matrices have, 0 if it is no such product."""
    if equation.primitive.name != "dot_general":
        return 0
    (summed, _), (batch, _) = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return math.prod(shape[axis] for axis in summed) if batch else 0
