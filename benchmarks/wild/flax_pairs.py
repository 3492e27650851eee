"""A Flax model of transformers beside its PyTorch one, each called as people call it."""

import functools
import tempfile

import numpy as np
import torch
import transformers

from benchmarks.wild import inputs
from benchmarks.wild.hugging_face import First, logits_of
from benchmarks.wild.settings import Pair, perturb

ATTENTION = "eager"  # its steps can be compared one by one


@functools.lru_cache(maxsize=1)
def both(name, config_name, overrides):
    """Returns the PyTorch model, perturbed, and the Flax model loaded from its checkpoint.

    Args:
        name: of the PyTorch class; that of Flax has "Flax" before it.
        config_name: of the configuration's class.
        overrides: pairs of a setting and its value.
    """
    config = getattr(transformers, config_name)(**dict(overrides))
    config._attn_implementation = ATTENTION
    model = perturb(getattr(transformers, name)(config))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        flax = getattr(transformers, f"Flax{name}").from_pretrained(folder, from_pt=True)
    return model, flax


def once(model, flax, given, seen=None):
    """Returns a pair that calls both models once.

    Args:
        model: of PyTorch.
        flax: the same in Flax.
        given: the inputs, by name.
        seen: which positions of the result are no padding.
    """

    def call(params, **kwargs):
        return logits_of(flax(**kwargs, params=params))

    return Pair(First(model), (call, flax.params), given, None, seen)


class Decode(torch.nn.Module):
    """A prompt, then token by token with a cache, as ``generate`` does it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        cache, start, found = None, 0, []
        for end in range(inputs.PROMPT, input_ids.shape[1] + 1):
            given = self.model.prepare_inputs_for_generation(
                input_ids[:, :end], attention_mask=attention_mask[:, :end], past_key_values=cache,
                use_cache=True, cache_position=torch.arange(start, end),
            )  # fmt: skip
            output = self.model(**given)
            cache, start = output.past_key_values, end
            found.append(output.logits)
        return found


def decode(model, flax, ids, mask):
    """Returns a pair that decodes given tokens with a cache."""
    total = ids.shape[1]

    def call(params, input_ids, attention_mask):
        given = flax.prepare_inputs_for_generation(
            input_ids[:, : inputs.PROMPT], total, attention_mask[:, : inputs.PROMPT]
        )
        found, start = [], 0
        for end in range(inputs.PROMPT, total + 1):
            output = flax(input_ids[:, start:end], params=params, **given)
            given, start = flax.update_inputs_for_generation(output, given), end
            found.append(output.logits)
        return found

    return Pair(
        Decode(model), (call, flax.params), {"input_ids": ids, "attention_mask": mask}, None,
        mask[:, : inputs.PROMPT],
    )  # fmt: skip


class DecodeWithEncoder(torch.nn.Module):
    """An encoder, then a decoder token by token with a cache."""

    def __init__(self, model, main):
        super().__init__()
        self.model, self.main = model, main

    def forward(self, decoder_input_ids, **given):
        encoded = self.model.get_encoder()(**given)
        mask = {n: x for n, x in given.items() if n == "attention_mask"}
        cache, start, found = None, 0, []
        for end in range(inputs.PROMPT, decoder_input_ids.shape[1] + 1):
            output = self.model(
                encoder_outputs=encoded, decoder_input_ids=decoder_input_ids[:, start:end],
                past_key_values=cache, use_cache=True, **mask,
            )  # fmt: skip
            cache, start = output.past_key_values, end
            found.append(output.logits)
        return found


def decode_with_encoder(model, flax, decoder_ids, given):
    """Returns a pair that encodes, and decodes given tokens with a cache."""
    total = decoder_ids.shape[1]
    main = next(name for name in given if name != "attention_mask")

    def call(params, decoder_input_ids, **given):
        encoded = flax.encode(**given, params=params)
        state = flax.prepare_inputs_for_generation(
            decoder_input_ids[:, : inputs.PROMPT], total,
            attention_mask=given.get("attention_mask"), encoder_outputs=encoded,
        )  # fmt: skip
        found, start = [], 0
        for end in range(inputs.PROMPT, total + 1):
            output = flax.decode(decoder_input_ids[:, start:end], params=params, **state)
            state, start = flax.update_inputs_for_generation(output, state), end
            found.append(output.logits)
        return found

    given = {**given, "decoder_input_ids": decoder_ids}
    return Pair(DecodeWithEncoder(model, main), (call, flax.params), given)


def seen_in(mask):
    """Returns the mask as booleans, None where nothing is padded."""
    return None if mask.all() else np.asarray(mask, bool)
