"""What a model's settings of generation say that nobody follows here.

transformers takes them from ``generation_config.json``, or from ``config.json`` without one. Ids of
special tokens are read (``Checkpoint.last_ids``, ``target_ids``); temperature, ``top_k`` and
``top_p`` are the caller's. The others here would change the text.
"""

from collections.abc import Mapping
from typing import Any

from jaxformer.errors import CheckpointError, UnsafeFileError
from jaxformer.porting.checkpoint import Checkpoint
from jaxformer.porting.formats.raw_checkpoints import read_config
from jaxformer.porting.mapping.unread_settings import listed

FILE = "generation_config.json"
# Settings that change which token comes next, and the values with which they do not.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_beams": (1,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_decoder_ids": ([],),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1.0,),
    "penalty_alpha": (0.0,),
    "stop_strings": ("", []),
    "typical_p": (1.0,),
    "min_p": (0.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
}


def describe_unfollowed(checkpoint: Checkpoint) -> list[str]:
    """Returns one line that names the settings of generation that nobody follows, or none."""
    file = checkpoint.files_beside().get(FILE)
    settings = checkpoint.config
    if file is not None:
        try:
            settings = read_config(file)
        except (CheckpointError, UnsafeFileError):
            # Whoever reads its ids says so.
            return []
    if not isinstance(settings, Mapping):
        return []
    unfollowed = {
        name: settings[name]
        for name, known in WITHOUT_EFFECT.items()
        if settings.get(name) is not None and settings[name] not in known
    }
    if not unfollowed:
        return []
    name = "config.json" if file is None else FILE
    return [
        f"{checkpoint.path}: {name} sets {listed(unfollowed)}, which jaxformer does not follow "
        "when it writes: the text may differ from that of transformers"
    ]
