"""Random settings of a model type, drawn by hypothesis from those that its class really has.

A draw begins with one of the type's cases, as its class completes it, and changes any of its
settings. What is drawn need not make a model: transformers may reject it, and so may jaxformer.
"""

import copy
import json
import typing
from typing import Any

import transformers
from hypothesis import strategies as st

from tests.support.hugging_face.case import Case
from tests.support.hugging_face.cases import CASES

# Not gelu_fast, whose square root of 2/π has ten digits: another test compares that.
ACTIVATIONS = (
    "gelu", "relu", "silu", "swish", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "quick_gelu",
    "relu2", "tanh", "leaky_relu", "mish", "gelu_10", "relu6", "sigmoid", "linear",
)  # fmt: skip
# Few of each, so that what one draw has compiled serves others.
SIZES = {
    "width": (24, 32, 48, 30),
    "heads": (4, 2, 3, 6, 1),
    "groups": (2, 1, 4, 3, None),
    "head": (8, 6, 10, 7, None),
    "layers": (2, 3, 1),
    "inner": (44, 20, None),
    "length": (320, 40, 29),
    "window": (7, 19, 1, 300, None),
    "original": (8, 64, 320, None),
    "few": (1, 2, 3, 4, 0, None),
}
KINDS = {
    "width": ("hidden_size", "d_model", "n_embd", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "groups": ("num_key_value_heads", "num_kv_heads"),
    "head": ("head_dim", "rotary_dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "length": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"),
    "window": ("sliding_window", "window_size"),
    "original": ("original_max_position_embeddings",),
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
# Who wrote the file, of which class it is, how weights are drawn, and the ids of tokens.
KEPT = {
    "model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "return_dict",
    "vocab_size", "id2label", "label2id", "is_encoder_decoder", "chunk_size_feed_forward",
    "output_hidden_states", "output_attentions", "problem_type", "bos_token_id", "eos_token_id",
    "use_cache", "initializer_range", "initializer_factor", "init_std",
}  # fmt: skip
LAYER_TYPES = ("full_attention", "sliding_attention")


def own_settings(case: Case) -> dict[str, Any]:
    """Returns the settings of a case as its class completes them, as in a config.json."""
    cls = getattr(transformers, case.kind).config_class
    config = cls(**{**case.usual, **copy.deepcopy(case.settings)})
    return json.loads(json.dumps(config.to_dict()))


@st.composite
def changed_cases(draw: Any, dialect: str) -> tuple[Case, dict[str, Any]]:
    """Draws a case of a type and other values for some of its settings."""
    case = draw(st.sampled_from([case for case in CASES.values() if case.dialect == dialect]))
    own = own_settings(case)
    types = _annotations(getattr(transformers, case.kind).config_class)
    names = sorted(own.keys() - KEPT)
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=6, unique=True))
    changes = {}
    for name in sorted(chosen):
        drawn = _values(name, own[name], types.get(name), own)
        changes[name] = draw(drawn.filter(lambda v, name=name: _may_be(v, types.get(name))))
    if "num_hidden_layers" in changes and isinstance(own.get("layer_types"), list):
        changes["layer_types"] = draw(_layer_types(changes["num_hidden_layers"]))
    return case, changes


def _annotations(cls: type) -> dict[str, Any]:
    """Returns which types a class of transformers says that its settings have."""
    found = (vars(each).get("__annotations__", {}) for each in reversed(cls.__mro__))
    return {name: kind for kinds in found for name, kind in kinds.items()}


def _may_be(value: Any, kind: Any) -> bool:
    """Whether a value is of the types that a setting is said to have."""
    kinds = typing.get_args(kind) or (kind,)
    return kind is None or isinstance(value, dict | list) or type(value) in kinds


def _layer_types(layers: int) -> st.SearchStrategy[Any]:
    return st.none() | st.lists(st.sampled_from(LAYER_TYPES), min_size=layers, max_size=layers)


def _values(name: str, value: Any, kind: Any, own: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Returns what a setting may be, from its name, from what it is, and from its types."""
    parts = name.split("_")
    if name in KIND_OF:
        return st.sampled_from((*SIZES[KIND_OF[name]], value))
    if name == "layer_types":
        return _layer_types(own["num_hidden_layers"])
    if name == "rope_parameters":
        return _rope_parameters(value)
    if isinstance(value, dict):
        inner = {key: _values(key, each, None, own) for key, each in value.items()}
        inner = {key: drawn for key, drawn in inner.items() if key not in KEPT}
        return st.fixed_dictionaries({}, optional=inner).map(lambda found: {**value, **found})
    if isinstance(value, list):
        return st.sampled_from((value, None))
    numbers: tuple[Any, ...] = (1.0, 0.3, 3.0)
    if "eps" in parts or "epsilon" in parts:
        numbers = (1e-3, 1e-6, 0.1)
    if "dropout" in parts or "pdrop" in parts:
        numbers = (0.0, 0.5)
    words = ACTIVATIONS if {"act", "afn", "activation"} & set(parts) else ("another",)
    same_kind = {bool: (True, False), int: (1, 2, 4), float: numbers, str: words}.get(type(value))
    if same_kind is not None:
        return st.sampled_from((*same_kind, value, None))
    known = typing.get_args(kind)
    return st.sampled_from(
        (
            None,
            *((True, False) if bool in known else ()),
            *((1, 2) if int in known else ()),
            *(numbers if float in known else ()),
        )
    )


def _rope_parameters(value: Any) -> st.SearchStrategy[Any]:
    """Returns rotary parameters, of each type of layer where the class has them so."""
    if isinstance(value, dict) and set(value) <= set(LAYER_TYPES):
        return st.fixed_dictionaries(dict.fromkeys(value, _rope()))
    return st.none() | _rope()


@st.composite
def _rope(draw: Any) -> dict[str, Any]:
    number = st.sampled_from((1.0, 2.0, 4.0, 0.5))
    factors = st.lists(number, min_size=1, max_size=5)
    kinds = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
    kind = draw(st.sampled_from(kinds))
    more = {
        "partial_rotary_factor": st.sampled_from((0.25, 0.5, 0.75, 1.0)),
        "factor": number,
        "original_max_position_embeddings": st.sampled_from((8, 64, 320)),
        "attention_factor": number,
        "beta_fast": st.sampled_from((32.0, 9.0, 1.5)),
        "beta_slow": st.sampled_from((1.0, 0.5)),
        "truncate": st.booleans(),
        "mscale": number,
        "mscale_all_dim": number,
        "low_freq_factor": st.just(1.0),
        "high_freq_factor": st.sampled_from((4.0, 2.0)),
        "short_factor": factors,
        "long_factor": factors,
    }
    needed = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings"),
        "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
        "llama3": (
            "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
        ),
        "proportional": ("partial_rotary_factor",),
    }.get(kind, ())  # fmt: skip
    chosen = draw(st.lists(st.sampled_from(sorted(more)), max_size=2, unique=True))
    base = draw(st.sampled_from((1e4, 300.0)))
    found = {name: draw(more[name]) for name in dict.fromkeys((*needed, *chosen))}
    return {"rope_type": kind, "rope_theta": base, **found}
