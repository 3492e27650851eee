"""Sources and targets: losses, gradients and steps of encoder-decoders on both sides."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import torch
from flax import nnx

import jaxformer.char_data
import jaxformer.pairs
import jaxformer.sampling
import jaxformer.token_data
import torch_ref.char_data
import torch_ref.config
import torch_ref.encoder_decoder
import torch_ref.pairs
import torch_ref.sampling
import torch_ref.token_data
import torch_ref.train_step
from jaxformer.config import EncoderDecoderConfig, OptimizerConfig
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.errors import TextError
from jaxformer.parameters import split
from jaxformer.porting import export_arrays
from jaxformer.train_step import TrainState, evaluation_step, language_model_loss, train_step
from jaxformer.training.parallel import MeshStrategy, PmapStrategy, StepSpec
from parity_tests.twins import copy_to_torch
from tests.support.folders_of_tokens import write_folder
from tests.support.hugging_face.building import ported_buffers
from tests.support.hugging_face.precision import in_float64
from tests.support.hugging_face.proof import Proof
from tests.support.tiers import full_after

V, S, T, A, B = 29, 13, 9, 2, 3
BASE = {
    "d_model": 20, "num_heads": 4, "head_dim": 6, "d_ff": 23, "num_encoder_layers": 1,
    "num_decoder_layers": 2, "context_length": 40, "source_vocab_size": V, "target_vocab_size": V,
    "shared_embedding": True, "tie_embeddings": True,
}  # fmt: skip
MODELS = {
    "t5": {
        "positions": "relative_buckets", "num_position_buckets": 8, "max_bucket_distance": 9,
        "attention_scale": 1.0, "norm": "rms_norm", "block": "pre_norm", "head_bias": False,
    },
    "bart": {"positions": "learned", "shared_positions": False, "embedding_norm": True},
    "two vocabularies": {
        "shared_embedding": False,
        "tie_embeddings": False,
        "source_vocab_size": 31,
    },
}  # fmt: skip
OPTIMIZER = OptimizerConfig(
    warmup_steps=2, decay_steps=20, learning_rate=3e-3, clip_norm=0.5, z_loss=1e-3,
    label_smoothing=0.1, ema=0.9,
)  # fmt: skip


def pairs(seed, rows=(A, B), vocabulary=V, begin=0):
    """Inputs and targets (…, T) and sources (…, S) of random lengths, one row of them whole."""
    random = np.random.default_rng(seed)
    answers, sources = (random.integers(3, vocabulary, (*rows, n)) for n in (T, S))
    inputs = np.concatenate([np.full((*rows, 1), begin), answers[..., :-1]], axis=-1)
    for ids, least in ((answers, 1), (sources, 2)):
        lengths = random.integers(least, ids.shape[-1], rows)
        lengths[..., 0] = ids.shape[-1]
        ids[np.arange(ids.shape[-1]) >= lengths[..., None]] = -100
    inputs[answers < 0] = 0
    return inputs, answers, sources


@pytest.mark.parametrize("name", full_after(1, ["t5", "bart"]))
def test_the_loss_and_its_gradients_are_those_of_transformers(name):
    proof = Proof(name)
    silent = {"t5": {"dropout_rate": 0.0, "pad_token_id": 0}, "bart": {"dropout": 0.0}}[name]
    proof.case = dataclasses.replace(proof.case, settings={**proof.case.settings, **silent})
    source = proof.exact_source
    config = source.config
    inputs, targets, sources = pairs(1, (4,), config.vocab_size, config.decoder_start_token_id)
    definition, parameters = split(proof.target)

    def loss(parameters):
        divisor = (targets >= 0).sum().astype(float)
        return language_model_loss(
            definition, parameters, inputs, targets, None, beside=sources, divisor=divisor
        )

    source.zero_grad()
    for bias in ported_buffers(source).values():
        bias.requires_grad_()
    with in_float64():
        expected = source(
            input_ids=torch.from_numpy(np.where(sources < 0, config.pad_token_id, sources)),
            attention_mask=torch.from_numpy(sources >= 0).long(),
            labels=torch.from_numpy(targets),
        ).loss
        expected.backward()
        value, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-12)
    assert proof._gradients(gradients) <= 1e-12


def build(name):
    config = EncoderDecoderConfig(**{**BASE, **MODELS[name]})
    model = EncoderDecoder(config, rngs=nnx.Rngs(0))
    definition, parameters = split(model)
    same = torch_ref.config.EncoderDecoderConfig(**config.settings())
    twin = torch_ref.encoder_decoder.EncoderDecoder(same).double()
    copy_to_torch(model, twin)
    return definition, {n: p.astype("float64") for n, p in parameters.items()}, twin


@pytest.mark.parametrize("name", full_after(1, MODELS))
def test_twenty_steps_agree_with_torch(name):
    definition, parameters, twin = build(name)
    state = TrainState.create(parameters, OPTIMIZER)
    step = jax.jit(
        functools.partial(train_step, definition=definition, optimizer=OPTIMIZER, masked=True)
    )
    optimizer = torch_ref.config.OptimizerConfig(**dataclasses.asdict(OPTIMIZER))
    reference = torch_ref.train_step.TrainState.create(twin, optimizer)
    losses = []
    for number in range(20):
        batch = pairs(number % 4)
        state, found = step(state, batch, None)
        reference, expected = torch_ref.train_step.train_step(
            reference, tuple(map(torch.from_numpy, batch)), optimizer=optimizer, masked=True
        )
        losses.append(float(found["train_loss"]))
        for name in ("train_loss", "grad_norm"):
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-10)
    assert losses[-1] < losses[0]
    expected = {name: p.detach().numpy() for name, p in twin.named_parameters()}
    for name, value in export_arrays(state.parameters).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-9, err_msg=name)

    inputs, targets, sources = (x[0] for x in pairs(30))
    evaluate = jax.jit(functools.partial(evaluation_step, definition=definition))
    found = evaluate(state.parameters, inputs, targets, targets >= 0, sources)
    arrays = map(torch.from_numpy, (inputs, np.maximum(targets, 0), targets >= 0, sources))
    expected = torch_ref.train_step.evaluation_step(twin, *arrays)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_padding_changes_nothing():
    definition, parameters, _ = build("t5")
    inputs, targets, sources = (x[0, :1] for x in pairs(5))
    targets[0, 6:] = sources[0, 8:] = -100
    evaluate = jax.jit(functools.partial(evaluation_step, parameters, definition=definition))
    counted = targets >= 0
    alone = evaluate(inputs[:, :6], targets[:, :6], counted[:, :6], sources[:, :8])
    padded = evaluate(inputs, targets, counted, sources)
    np.testing.assert_allclose(padded, alone, rtol=1e-13)
    sources[0, 8:] = 7
    assert abs(evaluate(inputs, targets, counted, sources) - alone) > 1e-6


def write_pairs(folder, count=23):
    """Documents of an opening id, a prompt of 1 to 8 ids, an answer of 0 to 6, and an end."""
    random = np.random.default_rng(8)
    splits, documents, answers, expected = {}, {}, {}, {}
    for name in ("train", "val"):
        lengths = random.integers((1, 0), (9, 7), (count, 2))
        pairs = [[random.integers(3, V, n).tolist() for n in each] for each in lengths]
        whole = [[1, *prompt, *answer, 2] for prompt, answer in pairs]
        splits[name] = np.concatenate(whole)
        documents[name] = np.cumsum([0, *map(len, whole[:-1])])
        answers[name] = np.concatenate(
            [np.arange(len(w)) > len(p) for w, (p, _) in zip(whole, pairs, strict=True)]
        )
        expected[name] = pairs
    write_folder(folder, splits, vocab_size=V, shard=37, documents=documents, answers=answers)
    return expected


def test_rows_of_pairs_are_the_same_and_what_the_documents_say(tmp_path):
    expected = write_pairs(tmp_path)["train"]
    made = []
    for side in (jaxformer, torch_ref):
        split = side.token_data.TokenFolder(tmp_path).train
        pairs = side.pairs.Pairs(split, begin=[0, 7], before=[5], after=[2, 6], opening=1)
        assert (pairs.longest_source, pairs.longest_target) == (8 + 3, 6 + 2)
        with pytest.raises(
            (TextError, ValueError), match=r"sources of .* the longest 11; .* targets"
        ):
            side.pairs.PairRows(pairs, 6, 5)
        rows = side.pairs.PairRows(pairs, 12, 9)
        cut = side.pairs.PairRows(pairs, 6, 5, truncate=True)
        order = side.sampling.draw_rows(rows, "epoch", 3, 4, 7)
        made.append([side.sampling.batch_of(each, order) for each in (rows, cut)])
    jax.tree.map(np.testing.assert_array_equal, *made)

    def padded(ids, length, value=-100):
        return [*ids, *[value] * (length - len(ids))]

    for index, (prompt, answer) in enumerate(expected):
        target = [7, *answer, 2]
        found = [array.tolist() for array in rows[index]]
        assert found[0] == padded([0, *target[:-1]], 9, 0)
        assert found[1] == padded(target, 9)
        assert found[2] == padded([5, *prompt, 2, 6], 12)
        found = [array.tolist() for array in cut[index]]
        target = [7, *answer[:3], 2]
        assert found[1] == padded(target, 5)
        assert found[2] == padded([5, *prompt[:3], 2, 6], 6)


def test_documents_that_are_no_pairs_are_rejected(tmp_path):
    def read(answers, **more):
        ids = {"train": np.arange(9), "val": np.arange(9)}
        known = {} if answers is None else {"answers": dict.fromkeys(ids, answers)}
        write_folder(tmp_path, ids, vocab_size=V, documents={n: [0, 4] for n in ids}, **known)
        return jaxformer.pairs.Pairs(
            jaxformer.token_data.TokenFolder(tmp_path).train, begin=[0], **more
        )

    assert len(read([0, 0, 1, 1, 0, 1, 1, 1, 1])) == 2
    assert len(read([1, 1, 1, 1, 0, 1, 1, 1, 1], after=[2])) == 2
    for answers, more, message in (
        (None, {}, "does not say which tokens are answers"),
        ([0, 1, 0, 1, 0, 1, 1, 1, 1], {}, "document 1 of .* one answer"),
        ([0, 0, 1, 1, 0, 1, 1, 1, 0], {}, "document 2 of .* one answer"),
        ([0, 0, 1, 1, 0, 0, 0, 0, 0], {}, "document 2 of .* one answer"),
        ([0, 0, 1, 1, 1, 1, 1, 1, 1], {}, "document 2 of .* no prompt"),
    ):
        with pytest.raises(TextError, match=message):
            read(answers, **more)


@pytest.mark.parametrize("strategy", full_after(0, ["mesh", "pmap"], slow_after=1))
def test_strategies_are_one_device_in_float64(strategy):
    config = EncoderDecoderConfig(
        d_model=24, num_heads=4, d_ff=32, encoder_num_heads=2, num_encoder_layers=1,
        num_decoder_layers=2, context_length=16, source_vocab_size=31, target_vocab_size=29,
        positions="learned", shared_positions=False, embedding_norm=True, tie_embeddings=False,
    )  # fmt: skip
    optimizer = OptimizerConfig(learning_rate=1e-2, decay_steps=9)
    definition, drawn = split(EncoderDecoder(config, rngs=nnx.Rngs(0)))
    parameters = {name: value.astype("float64") for name, value in drawn.items()}
    random = np.random.default_rng(0)
    inputs, targets, sources = (random.integers(0, 29, (1, 8, n)) for n in (7, 7, 11))
    targets[0, :3, 2:], sources[0, 2:6, 5:] = -100, -100
    one, _ = train_step(
        TrainState.create(parameters, optimizer),
        (inputs, targets, sources),
        None,
        definition=definition,
        optimizer=optimizer,
        masked=True,
    )
    spec = StepSpec(
        definition=definition, shapes=parameters, optimizer=optimizer, seed=0, batch_size=8,
        context_length=7, source_length=11, uses_dropout=False, row="pairs",
    )  # fmt: skip
    devices = jax.local_devices()[:8]
    made = PmapStrategy(spec, devices)
    if strategy == "mesh":
        made = MeshStrategy(spec, devices, fsdp=2, tensor=2)
    rows = np.concatenate([inputs[0], targets[0], sources[0]], axis=1).astype(np.int32)
    placed = made.place_windows(lambda chosen: rows[chosen][None], 1)
    state = made.place(TrainState.create(parameters, optimizer))
    before = made.evaluate(state.parameters, None, rows, targets[0] >= 0, 4)
    state, history = made.train(state, None, placed, 1)
    np.testing.assert_allclose(history["train_loss"][0], before, rtol=1e-12)
    found = made.fetch(state.parameters)
    for name, value in one.parameters.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)
