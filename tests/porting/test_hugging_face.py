"""The dialects of Hugging Face: models of transformers compute the same once they are ported."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer import positions
from jaxformer.generation import generate
from jaxformer.parameters import merge, split
from jaxformer.porting.api import export_plan, from_torch
from jaxformer.porting.formats.arrays import to_stored_tensors
from jaxformer.porting.mapping.transfer import import_tensors
from tests.support.hugging_face import (
    assert_close,
    build_case,
    in_float32,
    randomize,
    run_source,
    run_target,
    same_tables,
    source_tables,
    tokens,
)
from tests.support.hugging_face_cases import BATCH, CASES, LENGTH, MAKES_TEXT, ROTARY, VOCAB
from tests.support.tiers import first_of_each, full_except

pytestmark = pytest.mark.usefixtures("float64")

GENERATED = 41


@pytest.fixture(scope="module", params=first_of_each(CASES, lambda name: CASES[name].dialect))
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def source(case):
    return randomize(build_case(case))


@pytest.fixture(scope="module")
def target(case, source):
    return from_torch(source, case.dialect)


@pytest.mark.tier("full")
def test_outputs_are_equal(source, target):
    ids = tokens()
    for found, expected in zip(
        run_target(target, ids), run_source(source, target, ids), strict=True
    ):
        assert_close(found, expected.detach(), 1e-11)


def test_outputs_are_equal_at_the_tokens_beside_padding(case, source, target):
    ids = tokens(1)
    real = np.ones((BATCH, LENGTH), bool)
    real[0, :57] = False
    real[1, -71:] = False
    more = {}
    if case.dialect == "opt":
        # Its positions count from the first token, all others' from the first place.
        more["positions"] = jnp.asarray(np.maximum(np.cumsum(real, 1) - 1, 0))
    (found, *_) = run_target(target, ids, jnp.asarray(real)[:, None, None, :], **more)
    (expected, *_) = run_source(source, target, ids, attention_mask=real.astype(int))
    assert_close(np.asarray(found)[real], expected.detach()[real], 1e-11)


@pytest.mark.tier("full")
def test_gradients_are_equal(case, source, target):
    ids = tokens(3)
    labels = np.roll(ids, -1, axis=1)
    source.zero_grad()
    _source_loss(run_source(source, target, ids), labels).backward()
    links = export_plan(target, case.dialect).links
    gradients = {name: p.grad for name, p in source.named_parameters() if p.grad is not None}
    if case.kind == "BertForMaskedLM" and not source.config.tie_word_embeddings:
        # They do not use this one.
        assert "cls.predictions.bias" not in gradients
        gradients["cls.predictions.bias"] = gradients["cls.predictions.decoder.bias"]
    assert gradients.keys() == dict(source.named_parameters()).keys()
    aliases = export_plan(target, case.dialect).module_mapping.aliases
    for alias, name in aliases.items():
        gradients.setdefault(name, gradients.get(alias))
    expected = import_tensors(links, to_stored_tensors(gradients))
    definition, parameters = split(target)

    def loss(parameters):
        return _target_loss(run_target(merge(definition, parameters), ids), labels)

    found = jax.jit(jax.grad(loss))(parameters)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        reference = expected[name].read()
        if name.endswith("k_proj.bias") and target.config.position.positions != "rotary":
            # It adds the same to all scores of a query, which the softmax does not see.
            noise = 1e-12 * np.abs(found[name.replace("k_proj", "q_proj")]).max()
            assert np.abs(gradient).max() <= noise
            assert np.abs(reference).max() <= noise
        else:
            assert_close(gradient, reference, 1e-10, name)


def _source_loss(outputs, labels):
    if outputs[0].shape[-1] == VOCAB:
        flat = outputs[0].flatten(0, 1)
        return torch.nn.functional.cross_entropy(flat, torch.as_tensor(labels).flatten())
    return sum((output.sin() * (1 + n)).sum() for n, output in enumerate(outputs))


def _target_loss(outputs, labels):
    if outputs[0].shape[-1] == VOCAB:
        log_probs = jax.nn.log_softmax(outputs[0])
        return -jnp.take_along_axis(log_probs, jnp.asarray(labels)[..., None], -1).mean()
    return sum((jnp.sin(output) * (1 + n)).sum() for n, output in enumerate(outputs))


@pytest.mark.parametrize("name", full_except(MAKES_TEXT, lambda name: name in ("gpt2", "llama")))
def test_greedy_texts_are_equal(name):
    case = CASES[name]
    # Large weights and small embeddings, so that a text does not repeat its last token.
    source = randomize(build_case(case), std=0.5, embeddings=0.2)
    target = from_torch(source, case.dialect)
    prompt = tokens(4, (BATCH, 11))
    with in_float32(), same_tables(source, target):
        expected = source.generate(
            torch.as_tensor(prompt),
            attention_mask=torch.ones(prompt.shape, dtype=torch.long),
            do_sample=False,
            max_new_tokens=GENERATED,
            pad_token_id=0,
        )
    found = generate(target, prompt, GENERATED, greedy=True)
    assert np.array_equal(found, expected[:, prompt.shape[1] :])
    assert len(np.unique(found)) > 2


@pytest.mark.parametrize("name", full_except(ROTARY, lambda name: name == "llama"))
def test_what_is_left_in_float64_is_the_rotary_tables(name, monkeypatch):
    case = CASES[name]
    source = randomize(build_case(case))
    target = from_torch(source, case.dialect)
    ids = tokens(5)
    with in_float32():
        expected = source(torch.as_tensor(ids))[0].detach()
    assert_close(run_target(target, ids)[0], expected, 1e-5)
    with in_float32():
        tables = source_tables(source)
    monkeypatch.setattr(positions, "rotary_tables", lambda *settings: tables)
    assert_close(run_target(target, ids)[0], expected, 1e-11)


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_tables_differ_in_last_bits_only(name):
    case = CASES[name]
    source = build_case(case)
    position = from_torch(source, case.dialect).blocks[0].attention.position
    target = positions.rotary_tables(
        position.max_length, position.width, position.base, position.scaling
    )
    # A frequency is a quotient, a power and, where it is stretched, up to five operations more:
    # eight roundings of 2^-24. The angle, one more, is up to as many radians as the position.
    bound = 9 * 2.0**-24 * np.arange(position.max_length)[:, None] + 2.0**-23
    for found, expected in zip(source_tables(source), target, strict=True):
        assert found.shape == expected.shape
        assert (np.abs(found - expected) <= bound).all()


def test_token_types_are_theirs():
    case = CASES["bert no pooler"]
    source = randomize(build_case(case))
    target = from_torch(source, "bert")
    ids = tokens(7)
    types = np.random.default_rng(8).integers(0, 3, ids.shape)
    (expected,) = run_source(source, target, ids, token_type_ids=types)
    (found,) = run_target(target, ids, None, jnp.asarray(types))
    assert_close(found, expected.detach(), 1e-11)


def test_gelu_fast_is_gelu_new_to_ten_digits():
    case = CASES["gpt_neox"]
    case = dataclasses.replace(case, settings={**case.settings, "hidden_act": "gelu_fast"})
    source = randomize(build_case(case))
    target = from_torch(source, "gpt_neox")
    ids = tokens(9)
    # It has 0.7978845608 for sqrt(2/π): 4e-12 of the tanh's argument.
    assert_close(run_target(target, ids)[0], run_source(source, target, ids)[0].detach(), 1e-11)
    assert np.float32(0.7978845608) == np.float32(np.sqrt(2 / np.pi))
