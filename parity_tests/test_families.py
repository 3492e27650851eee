"""docs/reference/families.md, line by line: the family's own code, and the mirror's."""

import doctest
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxformer.layers
import torch_ref.layers
from jaxformer.parameters import abstract, merge, split
from jaxformer.porting import export_arrays
from parity_tests.family_cases import (
    FUNCTION_ROWS,
    INPUTS,
    MODULE_ROWS,
    SETTINGS,
    WITH_GRADIENT,
    arguments_of,
    places_of,
    variants_of,
)
from parity_tests.family_rows import (
    DOCUMENT,
    FAMILIES,
    ROWS,
    Subject,
    defined_in,
    family_module,
    numbers,
    translate,
    vocabulary,
)
from parity_tests.harness import JAX, TORCH, cotangent_of, widened
from parity_tests.verdict import judge_float64
from tests.support.tiers import first_of_each


def on(side: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arrays among the arguments as tensors, or as JAX arrays."""
    make = jnp.asarray if side == "jax" else lambda a: torch.from_numpy(np.array(a))
    return {n: make(a) if isinstance(a, np.ndarray) else a for n, a in arguments.items()}


def flatten(result: Any) -> list[Any]:
    if isinstance(result, tuple | list):
        return [leaf for part in result for leaf in flatten(part)]
    return [result]


def run_torch(module: Any, code: str, words: dict, arguments: dict) -> dict[str, np.ndarray]:
    """Output, weights, and the gradients of inputs and parameters, by the module's own names."""
    words = {**SETTINGS, **words, **on("torch", arguments), "module": module}
    inputs = {n: words[n].requires_grad_() for n in used(code, arguments)}
    output, *weights = flatten(eval(code, words))
    leaves = {f"input.{n}": x for n, x in inputs.items()}
    leaves |= {f"parameter.{n}": p for n, p in module.named_parameters()}
    result = {"output": widened(output)} | {
        f"weights.{i}": widened(w) for i, w in enumerate(weights)
    }
    if output.requires_grad:
        loss = torch.sum(output * torch.from_numpy(cotangent_of(tuple(output.shape))))
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        result |= numbers(zip(leaves, gradients, strict=True))
    return result


def used(code: str, arguments: dict[str, Any]) -> list[str]:
    """The inputs of a call that get a gradient."""
    names = compile(code, "", "eval").co_names
    return [n for n in names if n in WITH_GRADIENT and arguments[n] is not None]


def run_jax(subject: Subject, masks: dict, arguments: dict) -> dict[str, np.ndarray]:
    """The same of our JAX side, by torch_ref's names."""
    code = subject.row.candidate[1]
    definition, parameters = split(subject.module)
    words = {**SETTINGS, **subject.words["jax"], **on("jax", arguments)}
    inputs = {name: words[name] for name in used(code, arguments)}

    def total(parameters: Any, inputs: Any) -> Any:
        module = merge(definition, parameters)
        jaxformer.layers.inject_keep_masks(module, on("jax", masks))
        output, *weights = flatten(eval(code, {**words, **inputs, "module": module}))
        return jnp.sum(output * cotangent_of(output.shape)), (output, weights)

    # Not jitted: operations are compiled once for all rows.
    run = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    (_, (output, weights)), (by_parameter, by_input) = run(parameters, inputs)
    return {
        "output": widened(output),
        **{f"weights.{i}": widened(w) for i, w in enumerate(weights)},
        **{f"input.{name}": widened(g) for name, g in by_input.items()},
        **{f"parameter.{n}": widened(g) for n, g in export_arrays(by_parameter).items()},
    }


def renamed(family: str, result: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A family's result with its parameters' gradients by torch_ref's names."""
    prefix = "parameter."
    gradients = {n.removeprefix(prefix): a for n, a in result.items() if n.startswith(prefix)}
    rest = {name: array for name, array in result.items() if not name.startswith(prefix)}
    return rest | {prefix + name: a for name, a in translate(family, gradients).items()}


def compare(subject: Subject, arguments: dict, masks: dict, reference: dict) -> None:
    """Compares JAX and torch_ref with the family's result, gradients of inputs included."""
    reference = renamed(subject.row.family, reference)
    for candidate in (
        run_jax(subject, masks, arguments),
        run_torch(subject.twin, subject.row.candidate[1], subject.words["torch"], arguments),
    ):
        if subject.row.name == "ALiBi":
            candidate = {"output": candidate["output"]}
        judge_float64(candidate, reference)


def module_rows(*, every_variant: bool) -> list[Any]:
    """Every row of a module, once or in each of its variants."""
    parameters = []
    for row in MODULE_ROWS:
        for number, variant in enumerate(variants_of(row)):
            if every_variant or number == 0:
                name = f"{row}-{number}"
                parameters.append(pytest.param(row, variant, id=name))
    return parameters


@pytest.mark.parametrize(
    ("row", "variant"), first_of_each(module_rows(every_variant=True), lambda row, _: row.family)
)
def test_a_module_computes_the_same_in_evaluation_mode(row, variant):
    subject = Subject(row, {**SETTINGS, **variant})
    subject.train(False)
    arguments = arguments_of(row, variant)
    reference = run_torch(subject.reference, row.reference[1], {}, arguments)
    compare(subject, arguments, {}, reference)


def recorded_dropout(records: list[tuple[float, np.ndarray]]) -> Any:
    """A replacement of ``torch.nn.functional.dropout`` that records each rate and mask."""
    random = np.random.default_rng(19)

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or p == 0:
            return x
        keep = random.random(tuple(x.shape)) >= p
        records.append((p, keep))
        return torch.where(torch.from_numpy(keep), x / (1 - p), 0)

    return dropout


def masks_by_path(places: list[str], records: list[tuple[float, np.ndarray]]) -> dict:
    """The recorded masks by jaxformer's paths; those of one path are of one head each."""
    found: dict[str, list[np.ndarray]] = {}
    for place, (_, keep) in zip(places, records, strict=True):
        found.setdefault(place, []).append(keep)
    return {
        place: np.stack(keeps, axis=1) if keeps[0].ndim == 3 and "attention_dropout" in place
        else keeps[0]
        for place, keeps in found.items()
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "variant"), first_of_each(module_rows(every_variant=False), lambda row, _: row.family)
)
def test_a_module_drops_in_the_same_places(row, variant, monkeypatch):
    subject = Subject(row, {**SETTINGS, **variant})
    subject.train(True)
    arguments = arguments_of(row, variant)
    records: list[tuple[float, np.ndarray]] = []
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "dropout", recorded_dropout(records))
        reference = run_torch(subject.reference, row.reference[1], {}, arguments)
    masks = masks_by_path(places_of(row), records)
    for found in (
        jaxformer.layers.dropout_modules(subject.module),
        torch_ref.layers.dropout_modules(subject.twin),
    ):
        assert {path for path, place in found.items() if place.rate > 0} == masks.keys()
        assert {place.rate for place in found.values()} - {0.0} == {rate for rate, _ in records}
    torch_ref.layers.inject_keep_masks(subject.twin, on("torch", masks))
    compare(subject, arguments, masks, reference)


def same(reference: Any, candidate: Any) -> None:
    """Checks equality, up to the rounding of a softmax and a NaN that should be 0."""
    expected, results = flatten(reference), flatten(candidate)
    assert len(expected) == len(results)
    for one, other in zip(expected, results, strict=True):
        if isinstance(one, str):
            assert one == other
            continue
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        one = np.where(np.isnan(one), 0, one)
        assert one.shape == other.shape
        assert not np.isnan(other).any()
        np.testing.assert_allclose(other, one, rtol=1e-14, atol=0)


@pytest.mark.parametrize("row", FUNCTION_ROWS, ids=str)
def test_a_function_gives_the_same(row):
    arguments = {**arguments_of(row, {}), "start_tokens": INPUTS["start_tokens"]}
    made = {"family": {}, "jax": {}, "torch": {}}
    if row.name == "generate":
        gpt = next(r for r in ROWS if r.family == row.family and r.name == "GPT")
        subject = Subject(gpt, SETTINGS, perturb=0.7)
        subject.train(False)
        models = (subject.reference, subject.module, subject.twin)
        made = {side: {"model": m} for side, m in zip(made, models, strict=True)}
    elif len(row.reference) == 2:
        subject = Subject(row, SETTINGS)
        sides = (subject.reference, subject.module, subject.twin)
        made = {side: {"module": m} for side, m in zip(made, sides, strict=True)}
    own = defined_in(family_module(row.family))
    reference = eval(
        row.reference[-1], {**SETTINGS, **on("torch", arguments), **own, **made["family"]}
    )
    for side in (JAX, TORCH):
        name = "jax" if side is JAX else "torch"
        words = {**SETTINGS, **on(name, arguments), **vocabulary(side), **made[name]}
        same(reference, eval(row.candidate[-1], words))
    if row.name == "generate":
        assert reference.shape == (3, SETTINGS["max_new_tokens"])
        assert len(reference.unique()) >= 5


def test_the_familys_own_padding_mask_is_nan_where_it_should_allow():
    lengths = torch.tensor([1, 8, 5])
    bias = family_module("unified").padding_mask(lengths, 8)
    assert torch.isnan(bias).sum() == lengths.sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_class_and_function_has_a_line(family):
    helpers = {"encdec": {"split_heads", "join_heads", "masked_softmax"}}.get(family, set())
    named = {row.name for row in ROWS if row.family == family}
    assert named == defined_in(family_module(family)).keys() - helpers


def test_every_line_is_run():
    assert {row.family for row in ROWS} == set(FAMILIES)
    run = {parameter.values[0] for parameter in module_rows(every_variant=True)}
    assert run | set(FUNCTION_ROWS) == set(ROWS)


def test_the_example_in_the_document_holds():
    example = doctest.DocTestParser().get_doctest(
        DOCUMENT.read_text(encoding="utf-8"), {}, DOCUMENT.name, str(DOCUMENT), 0
    )
    assert len(example.examples) > 5
    with jax.enable_x64(False):
        assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("name", ["PostNormTransformerBlock", "PreNormTransformerBlock"])
def test_only_a_post_norm_block_has_outputs_of_standard_deviation_one(name):
    row = next(r for r in ROWS if r.family == "prepost" and r.name == name)
    subject = Subject(row, SETTINGS, perturb=0.0)
    subject.train(False)
    arguments = {"x": INPUTS["x"], "mask": np.ones((1, 1, 1, 1), int)}
    reference = run_torch(subject.reference, row.reference[1], {}, arguments)["output"]
    candidate = run_jax(subject, {}, arguments)["output"]
    assert candidate.std() == pytest.approx(reference.std(), rel=1e-12)
    assert (abs(candidate.std() - 1) < 1e-3) == (name == "PostNormTransformerBlock")


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", ["gpt2_small", "llama_style"])
def test_a_named_configuration_has_its_full_size(name):
    row = next(r for r in ROWS if r.name == name)
    defaults = inspect.signature(getattr(family_module("unified"), name)).parameters
    settings = {n: p.default for n, p in defaults.items() if p.default is not p.empty}
    with torch.device("meta"):
        reference = eval(row.reference[0], {**defined_in(family_module("unified")), **settings})
        twin = eval(row.candidate[0], {**vocabulary(TORCH), **settings})
    _, candidate = abstract(lambda _: eval(row.candidate[0], {**vocabulary(JAX), **settings}))
    sizes = {n: np.broadcast_to(0.0, p.shape) for n, p in reference.named_parameters()}
    expected = sorted(a.shape for a in translate("unified", sizes).values())
    assert sorted(tuple(p.shape) for p in twin.parameters()) == expected
    assert sum(p.size for p in candidate.values()) == sum(p.numel() for p in reference.parameters())
    assert len(candidate) == len(expected)
