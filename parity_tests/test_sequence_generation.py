"""Targets of sources: both sides write the same tokens, with caches and without, drawn ones too."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.config import EncoderDecoderConfig
from jaxformer.config_speech import SpeechTransformerConfig
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.narrow_linear import narrow_weights
from jaxformer.parameters import abstract, merge
from jaxformer.porting.mapping.naming import export_arrays
from jaxformer.sequence_generation import generate_target
from jaxformer.speech_transformer import SpeechTransformer
from tests.support.tiers import full_except
from torch_ref import config as torch_config
from torch_ref import config_speech as torch_config_speech
from torch_ref import encoder_decoder as torch_encoder_decoder
from torch_ref import sequence_generation as torch_sequence_generation
from torch_ref import speech_transformer as torch_speech_transformer
from torch_ref.narrow_linear import narrow_weights as torch_narrow_weights

pytestmark = pytest.mark.usefixtures("float64")

V, CONTEXT, TOKENS = 31, 40, 24
BASE = {
    "d_model": 20, "num_heads": 4, "head_dim": 6, "d_ff": 23, "num_encoder_layers": 1,
    "num_decoder_layers": 2, "context_length": CONTEXT, "source_vocab_size": V,
    "target_vocab_size": V, "shared_embedding": True, "tie_embeddings": True,
}  # fmt: skip
T5 = {
    "positions": "relative_buckets", "num_position_buckets": 8, "max_bucket_distance": 9,
    "attention_scale": 1.0, "norm": "rms_norm", "block": "pre_norm", "head_bias": False,
}  # fmt: skip
MODELS = {
    "t5": T5,
    "umt5": {**T5, "shared_buckets": False, "num_kv_heads": 2, "encoder_d_ff": 11},
    "bart": {
        "positions": "learned",
        "shared_positions": False,
        "embedding_norm": True,
        "block": "pre_norm",
    },
    # Without biases behind its last layer, which would make one token the best everywhere.
    "rotary": {
        "positions": "rotary",
        "shared_embedding": False,
        "tie_embeddings": False,
        "norm": "rms_norm",
        "head_bias": False,
    },
}
SOURCE = np.random.default_rng(5).integers(0, V, (3, 9))
MASK = np.arange(9)[None, :] < np.array([9, 6, 4])[:, None]
START = np.array([[3], [3], [3]])


SPEECH = {
    "source_vocab_size": 0, "shared_embedding": False, "key_bias": False, "num_features": 5,
    "encoder_length": 9,
}  # fmt: skip
SOUND = np.random.default_rng(5).standard_normal((3, 5, 18))


@functools.cache
def pair(name):
    if name == "speech":
        config = SpeechTransformerConfig(**{**BASE, **SPEECH})
        same = torch_config_speech.SpeechTransformerConfig(**config.settings())
        return _pair(SpeechTransformer, torch_speech_transformer.SpeechTransformer, config, same)
    config = EncoderDecoderConfig(**{**BASE, **MODELS[name]})
    same = torch_config.EncoderDecoderConfig(**config.settings())
    return _pair(EncoderDecoder, torch_encoder_decoder.EncoderDecoder, config, same)


def _pair(model, torch_model, config, same):
    definition, shapes = abstract(lambda rngs: model(config, rngs=rngs))
    rng = np.random.default_rng(2)
    values = {n: rng.normal(n.endswith("scale"), 0.4, s.shape) for n, s in shapes.items()}
    model = merge(definition, {n: jnp.asarray(value) for n, value in values.items()})
    twin = torch_model(same).double()
    twin.load_state_dict({n: torch.from_numpy(a) for n, a in export_arrays(values).items()})
    return model, twin


def on_both_sides(name, tokens=TOKENS, *, source=SOURCE, start=START, mask=MASK, **settings):
    """What both sides write; torch draws with the noise of JAX."""
    model, twin = pair(name)
    key = jax.random.key(11)
    made = iter(range(tokens))

    def draw(probabilities_BV, count, *, generator=None):
        noise = jax.random.gumbel(jax.random.fold_in(key, next(made)), probabilities_BV.shape)
        return (probabilities_BV.log() + torch.from_numpy(np.array(noise))).argmax(-1)[:, None]

    found = generate_target(model, source, tokens, start_BT=start, mask=mask, key=key, **settings)
    with mock.patch.object(torch, "multinomial", draw):
        expected = torch_sequence_generation.generate_target(
            twin,
            torch.as_tensor(source),
            tokens,
            start_BT=torch.as_tensor(start),
            mask=None if mask is None else torch.as_tensor(mask),
            **settings,
        )
    return found, expected.numpy()


SETTINGS = {
    "greedy": {"greedy": True},
    "drawn": {"temperature": 0.7, "top_k": 9, "top_p": 0.9},
    "greedy without cache": {"greedy": True, "use_cache": False},
    "drawn without cache": {"use_cache": False},
}


@pytest.mark.parametrize(
    ("name", "kind"),
    full_except(
        [(name, kind) for name in MODELS for kind in SETTINGS],
        lambda name, kind: name == "t5" and kind in ("greedy", "drawn"),
    ),
)
def test_both_sides_write_the_same(name, kind):
    found, expected = on_both_sides(name, **SETTINGS[kind])
    assert found.shape == (3, TOKENS)
    assert np.array_equal(found, expected)
    assert len(np.unique(found)) > 2


@pytest.mark.tier("full")
@pytest.mark.parametrize("kind", SETTINGS)
def test_suppressed_tokens_are_not_made(kind):
    free, _ = on_both_sides("bart", **SETTINGS[kind])
    never, not_first = int(free[0, 3]), int(free[1, 0])
    found, expected = on_both_sides(
        "bart", suppress_tokens=[never], begin_suppress_tokens=[not_first], **SETTINGS[kind]
    )
    assert np.array_equal(found, expected)
    assert never not in found
    assert not_first not in found[:, 0]


@pytest.mark.tier("full")
@pytest.mark.parametrize("kind", SETTINGS)
def test_both_sides_write_what_they_hear(kind):
    found, expected = on_both_sides("speech", source=SOUND, mask=None, **SETTINGS[kind])
    assert np.array_equal(found, expected)
    assert len(np.unique(found)) > 2


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", MODELS)
def test_the_cache_changes_nothing(name):
    (found, _), (again, _) = (
        on_both_sides(name, greedy=True, use_cache=use_cache) for use_cache in (True, False)
    )
    assert np.array_equal(found, again)


@pytest.mark.tier("full")
def test_a_row_of_a_batch_is_as_in_a_batch_of_one():
    found, _ = on_both_sides("bart", greedy=True)
    for row, length in enumerate((9, 6, 4)):
        alone, _ = on_both_sides(
            "bart", greedy=True, source=SOURCE[row : row + 1, :length], start=START[:1], mask=None
        )
        assert np.array_equal(alone[0], found[row])


@pytest.mark.tier("full")
def test_rows_end_with_stop_tokens_and_the_last_token_is_forced():
    free, _ = on_both_sides("t5", greedy=True)
    stop = int(free[0, 2])
    found, expected = on_both_sides("t5", greedy=True, stop_tokens=[stop], last_token=8)
    assert np.array_equal(found, expected)
    assert (found[0, 2:] == stop).all()
    ended = (found == stop).any(axis=1)
    assert (found[~ended, -1] == 8).all()
    two, _ = on_both_sides("t5", greedy=True, start=np.concatenate((START, free[:, :1]), axis=1))
    assert np.array_equal(two[:, :-1], free[:, 1:])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": SOURCE + V}, "source ids must be in"),
        ({"source": np.zeros((1, CONTEXT + 1), int), "mask": None}, "do not fit context_length"),
        ({"start": START[:2]}, "as many rows: got 3 and 2"),
        ({"tokens": CONTEXT + 1}, "target tokens do not fit context_length=40"),
        ({"mask": MASK & False}, "must have a token"),
        ({"stop_tokens": [V]}, "stop_tokens must be in"),
        ({"suppress_tokens": [-1]}, "suppress_tokens must be in"),
        ({"begin_suppress_tokens": list(range(V))}, "leave no token"),
        ({"top_k": 0}, "top_k"),
        ({"suppress_tokens": [0.5]}, "suppress_tokens must be an integer: got 0.5"),
        ({"tokens": 4.0}, "num_tokens must be an integer: got 4.0"),
        ({"tokens": -1}, "num_tokens must not be negative"),
    ],
)
def test_bad_input_is_rejected_on_both_sides(changes, words):
    given = {"source": SOURCE, "start": START, "mask": MASK, "tokens": 4, **changes}
    _is_rejected("t5", words, **given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": SOUND[:, :, 1:]}, r"features must be \(B, 5, 18\)"),
        ({"source": SOURCE}, r"features must be \(B, 5, 18\)"),
        ({"source": np.ones(SOUND.shape, int)}, "features must be floating point"),
        ({"mask": MASK}, "features have no mask"),
    ],
)
def test_wrong_features_are_rejected_on_both_sides(changes, words):
    given = {"source": SOUND, "start": START, "mask": None, "tokens": 4, **changes}
    _is_rejected("speech", words, **given)


def _is_rejected(name, words, *, source, start, tokens, mask, **given):
    model, twin = pair(name)
    with pytest.raises(ValueError, match=words):
        generate_target(model, source, tokens, start_BT=start, mask=mask, greedy=True, **given)
    with pytest.raises(ValueError, match=words):
        torch_sequence_generation.generate_target(
            twin,
            torch.as_tensor(source),
            tokens,
            start_BT=torch.as_tensor(start),
            mask=None if mask is None else torch.as_tensor(mask),
            greedy=True,
            **given,
        )


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("name", ["t5", "speech"])
def test_targets_of_narrow_weights_are_those_of_the_twin_with_them(name, dtype):
    model, twin = pair(name)
    source = SOUND if name == "speech" else SOURCE
    found = generate_target(
        narrow_weights(model, dtype), source, TOKENS, start_BT=START, greedy=True
    )
    expected = torch_sequence_generation.generate_target(
        torch_narrow_weights(twin, dtype),
        torch.as_tensor(source),
        TOKENS,
        start_BT=torch.as_tensor(START),
        greedy=True,
    )
    np.testing.assert_array_equal(found, expected.numpy())
