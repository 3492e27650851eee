"""A repro: one pair of modules with its weights and inputs, taken out of the models around it.

``write_repro`` (in ``repro_writing``) makes a folder: ``node.json`` says how both modules are built
and called, ``arrays.safetensors`` holds what they are given and what came of it, and ``repro.py``
runs both. This is what that script imports.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.config import from_dict
from jaxformer.errors import CheckpointError, UsageError
from jaxformer.parameters import merge
from jaxformer.parity import jax_side, torch_side
from jaxformer.parity.judge import judge
from jaxformer.parity.outline import scientific
from jaxformer.parity.reference import as_tensor, make_twin
from jaxformer.parity.report import Difference
from jaxformer.parity.slopes import same_slopes
from jaxformer.parity.tables import give_tables, table_difference
from jaxformer.porting.plans import OUR_CONFIGS
from jaxformer.porting.readers import read_config
from jaxformer.porting.safetensors_files import read_safetensors
from jaxformer.porting.tensors import StoredTensor
from jaxformer.positions import Rotary

FORMAT = 1
Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of running both modules.

    Attributes:
        differences: of each output and gradient, ours from theirs.
        theirs_changed: whether theirs gives something else than when the repro was written.
    """

    differences: Mapping[str, Difference]
    theirs_changed: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether all is rounding."""
        wrong = any(difference.is_bug for difference in self.differences.values())
        return not wrong and not self.theirs_changed

    def __str__(self) -> str:
        lines = [
            f"{name}: off by {scientific(d.relative)} of scale, allowed "
            f"{scientific(d.allowed / (d.scale or 1.0))}: {'bug' if d.is_bug else 'rounding'}"
            for name, d in self.differences.items()
        ]
        if self.theirs_changed:
            lines.append("theirs does not give what it gave when this was written")
        return "\n".join(lines)


class Repro:
    """A folder that ``write_repro`` wrote.

    Args:
        folder: the folder.

    Raises:
        CheckpointError: it is none, or damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.about = read_config(self.folder / "node.json")
        if self.about.get("format") != FORMAT:
            raise CheckpointError(f"{self.folder} holds no repro of format {FORMAT}")
        self.tensors = read_safetensors(self.folder / "arrays.safetensors")[0]

    def build_theirs(self) -> list[Any]:
        """Their modules, without weights.

        Raises:
            UsageError: the code that they are made of is not installed, or not known.
        """
        theirs = self.about["theirs"]
        whole = build_torch(theirs["library"], theirs["class"], theirs["config"])
        return [whole.get_submodule(call["path"]) for call in theirs["calls"]]

    def build_ours(self) -> list[Any]:
        """Our modules, without weights.

        Raises:
            UsageError: our model is not known.
        """
        ours = self.about["ours"]
        whole = build_ours(ours["class"], ours["config"])
        return [jax_side.resolve(whole, call["path"])[0] for call in ours["calls"]]

    def run(self, theirs: Any, ours: Any) -> Result:
        """Runs both and compares what comes of it.

        Args:
            theirs: of ``build_theirs``, or one built otherwise; it gets their weights.
            ours: of ``build_ours``, or one built otherwise; it gets our weights.
        """
        their_modules = theirs if isinstance(theirs, list) else [theirs]
        our_modules = ours if isinstance(ours, list) else [ours]
        traces = [
            run_theirs(
                load_state(module, self._part(f"theirs/{place}/state/")),
                call,
                self._arrays(f"theirs/{place}/arguments/"),
                backward=self.about["backward"],
            )
            for place, (module, call) in enumerate(
                zip(their_modules, self.about["theirs"]["calls"], strict=True)
            )
        ]
        changed = any(
            judge(output, self.tensors[f"theirs/{place}/output/{n}"].read()).is_bug
            for place, trace in enumerate(traces)
            for n, output in enumerate(trace.outputs[:1])
        )
        with jax.enable_x64(True), same_slopes(their_modules[0]):
            return Result(self._differences(our_modules), changed)

    def _differences(self, modules: Sequence[Any]) -> dict[str, Difference]:
        runs = [_Ours(self, place, module) for place, module in enumerate(modules)]
        found: dict[str, Difference] = {}
        for name, tensor in self.tensors.items():
            if not name.startswith("expected/"):
                continue
            _, place, kind, which = name.split("/", 3)
            expected = tensor.read()
            if kind == "input":
                # What several of ours pull back to what they were all given.
                group = self.about["groups"][int(which)]
                picked = functools.partial(_inputs, runs, group)
                label = f"gradient of input {group[0]}"
            else:
                picked = functools.partial(_picked, runs[int(place)], kind, which)
                label = "output" if kind == "output" else f"gradient of {which}"
            if len(runs) > 1 and kind != "input":
                label = f"{self.about['ours']['calls'][int(place)]['path']}: {label}"
            found[label] = judge(picked("float64"), expected, functools.partial(picked, "float32"))
        return dict(sorted(found.items(), key=lambda item: not item[0].endswith("output")))

    def _part(self, start: str) -> dict[str, StoredTensor]:
        return {
            name.removeprefix(start): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(start)
        }

    def _arrays(self, start: str) -> dict[str, np.ndarray]:
        return {name: tensor.read() for name, tensor in self._part(start).items()}


class _Ours:
    """One of our modules, with its weights and its tables."""

    def __init__(self, repro: Repro, place: int, module: Any):
        arrays = repro._arrays(f"ours/{place}/state/")
        self.module = with_weights(module, arrays)
        share_saved_tables(self.module, repro._part("tables/"))
        call = repro.about["ours"]["calls"][place]
        self.method = call["method"]
        given = repro._arrays(f"ours/{place}/arguments/")
        self.call = jax_side.Call(
            tuple(decode(each, given) for each in call["args"]),
            {name: decode(each, given) for name, each in call["kwargs"].items()},
            0,
        )
        cotangents = repro._arrays(f"ours/{place}/cotangents/")
        self.cotangents = [cotangents[name] for name in sorted(cotangents, key=int)] or None

    @functools.cache  # noqa: B019
    def outcome(self, dtype: str) -> jax_side.Outcome:
        """What it does in a dtype."""
        return jax_side.run_alone(
            self.module, self.method, self.call, {}, cotangents=self.cotangents, dtype=dtype
        )


def _picked(run: _Ours, kind: str, which: str, dtype: str) -> np.ndarray:
    outcome = run.outcome(dtype)
    if kind == "output":
        return outcome.output[int(which)]
    return outcome.parameter_gradients[which]


def _inputs(runs: Sequence[_Ours], group: Sequence[int], dtype: str) -> np.ndarray:
    outcomes = [run.outcome(dtype) for run in runs]
    return np.sum([o.input_gradients[n] for o in outcomes for n in group], axis=0)


def run_theirs(
    module: Any, call: Mapping[str, Any], arrays: Arrays, *, backward: bool
) -> torch_side.Trace:
    """Runs one of their modules by itself, in float64.

    Args:
        module: theirs.
        call: its arguments, encoded.
        arrays: of them.
        backward: whether to pull a gradient back through it.
    """
    names = list(arrays)

    def run(module: Any, given: Sequence[Any]) -> Any:
        tensors = dict(zip(names, given, strict=True))
        args = [decode(each, tensors) for each in call["args"]]
        return module(
            *args, **{name: decode(each, tensors) for name, each in call["kwargs"].items()}
        )

    def cotangents(outputs: list[np.ndarray]) -> list[np.ndarray]:
        # A gradient in every direction, so that nothing can hide.
        return [np.random.default_rng(0).standard_normal(outputs[0].shape)]

    with torch_side.everything_in_float64():
        return torch_side.run(
            torch_side.in_float64(module), [arrays[name] for name in names], call=run,
            cotangents=cotangents if backward else None, keep=lambda path: path == "",
            weights=False,
        )  # fmt: skip


def encode(value: Any, arrays: dict[str, np.ndarray], seen: dict[int, str]) -> Any:
    """An argument of a call as JSON, its arrays put aside.

    Args:
        value: the argument.
        arrays: by name; those of the value are added.
        seen: the names of arrays by identity, as one may be given twice.

    Raises:
        UsageError: it holds something that cannot be written.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, tuple | list):
        return {
            "items": [encode(each, arrays, seen) for each in value],
            "tuple": isinstance(value, tuple),
        }
    if isinstance(value, dict):
        return {"fields": {str(name): encode(each, arrays, seen) for name, each in value.items()}}
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if id(value) not in seen:
            seen[id(value)] = str(len(arrays))
            arrays[seen[id(value)]] = _array(value)
        return {"array": seen[id(value)]}
    raise UsageError(f"a {type(value).__name__} among its arguments cannot be written to a file")


def decode(value: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    """The inverse of ``encode``."""
    if "items" in value:
        items = [decode(each, arrays) for each in value["items"]]
        return tuple(items) if value["tuple"] else items
    if "fields" in value:
        return {name: decode(each, arrays) for name, each in value["fields"].items()}
    return arrays[value["array"]] if "array" in value else value["value"]


def build_torch(library: str, kind: str, config: Mapping[str, Any]) -> Any:
    """A whole model of theirs without its weights.

    Raises:
        UsageError: it is not known how, or what it needs is not installed.
    """
    torch = torch_side.require_torch()
    with torch.device("meta"):
        if library == "torch_ref":
            return make_twin(_our_config(kind, config))
        if library == "transformers":
            try:
                import transformers
            except ImportError as error:
                raise UsageError(
                    "this repro needs transformers: pip install transformers"
                ) from error
            cls = getattr(transformers, kind)
            # Through JSON, as from a file.
            settings = cls.config_class.from_dict(dict(config), attn_implementation="eager")
            return cls(settings)
    raise UsageError("how theirs is built is not known: build it in repro.py")


def build_ours(kind: str, config: Mapping[str, Any]) -> Any:
    """A whole model of ours, with shapes in place of weights.

    Raises:
        UsageError: it is not known how.
    """
    made = _our_config(kind, config)
    cls = OUR_CONFIGS[type(made)]
    module = nnx.eval_shape(lambda: cls(made, rngs=nnx.Rngs(0)))
    module.eval()
    return module


def _our_config(kind: str, config: Mapping[str, Any]) -> Any:
    for cls, model in OUR_CONFIGS.items():
        if model.__name__ == kind:
            return from_dict(cls, dict(config))
    raise UsageError("how ours is built is not known: build it in repro.py")


def load_state(module: Any, state: Mapping[str, StoredTensor]) -> Any:
    """Gives a module of theirs its parameters and buffers.

    Raises:
        UsageError: it has others.
    """
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    if own.keys() != state.keys():
        listed = ", ".join(sorted(own.keys() ^ state.keys()))
        raise UsageError(f"their module has not the arrays of the repro: {listed}")
    torch = torch_side.require_torch()
    for name, tensor in state.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        value = as_tensor(tensor.read())
        if leaf in owner._parameters:
            owner._parameters[leaf] = torch.nn.Parameter(
                value, requires_grad=value.is_floating_point()
            )
        else:
            owner._buffers[leaf] = value
    return module.eval()


def with_weights(module: Any, arrays: Arrays) -> Any:
    """A module of ours with other weights, in float64.

    Raises:
        UsageError: it has others.
    """
    definition, state = nnx.split(module, nnx.Param)
    own = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}
    if own != arrays.keys():
        listed = ", ".join(sorted(own ^ arrays.keys()))
        raise UsageError(f"our module has not the arrays of the repro: {listed}")
    made = merge(definition, {name: jnp.asarray(a, jnp.float64) for name, a in arrays.items()})
    made.eval()
    return made


def share_saved_tables(module: Any, tables: Mapping[str, StoredTensor]) -> None:
    """Gives rotary positions the tables of theirs, if ours are the same but for rounding."""
    for _, node in nnx.iter_modules(module):
        if isinstance(node, Rotary) and tables:
            theirs = tables["cos"].read(), tables["sin"].read()
            difference = table_difference(node.tables(), theirs)
            if difference is not None and not difference.is_bug:
                give_tables(node, theirs)


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "untyped_storage"):
        return np.asarray(torch_side.as_numpy(value))
    return np.asarray(value)
