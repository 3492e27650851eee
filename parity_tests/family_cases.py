"""What the lines of docs/reference/families.md are run with: sizes, inputs, variants, dropout."""

from typing import Any

import numpy as np

from parity_tests.family_rows import ROWS, Row

B, T, S, D, N, K, F, V = 3, 7, 11, 24, 4, 2, 34, 37
RANDOM = np.random.default_rng(3)
TEXT = "the quick brown fox jumps over the lazy dog"

SETTINGS: dict[str, Any] = {
    "d_model": D, "num_heads": N, "n_heads": N, "n_kv_heads": K, "d_ff": F, "d_k": 10,
    "num_layers": 2, "n_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 3,
    "vocab_size": V, "src_vocab_size": 41, "tgt_vocab_size": V, "max_len": 19,
    "max_relative_position": 3, "dropout": 0.3, "pad_token": 2, "T": T, "max_T": 8,
    "text": TEXT, "data": np.arange(13) ** 2, "block_size": 5,
    "max_new_tokens": 12, "temperature": 0.7, "top_k": 1,
    "config": {
        "vocabulary_size": V, "context_size": 19, "embedding_dim": D, "heads_num": N,
        "head_size": 6, "layers_num": 2, "dropout_rate": 0.3, "use_bias": False,
    },
}  # fmt: skip


def mask(*shape: int) -> np.ndarray:
    """A mask that blocks about a third; every query may attend to something."""
    allowed = RANDOM.random(shape) < 0.65
    allowed[..., 0] = True
    return allowed


def additive(allowed: np.ndarray) -> np.ndarray:
    return np.where(allowed, 0.0, -np.inf)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape)


def ids(*shape: int, below: int = V) -> np.ndarray:
    return RANDOM.integers(0, below, shape)


CAUSAL = np.tril(np.ones((T, T), bool))
WITH_GRADIENT = {name: normal(B, T, D) for name in ("x", "query", "q_input")} | {
    name: normal(B, S, D) for name in ("key", "value", "kv_input", "kv", "encoder_output")
}
WITH_GRADIENT["q"] = normal(B, N, T, 10)
INPUTS: dict[str, np.ndarray | None] = {
    **WITH_GRADIENT,
    "mask": mask(B, 1, T, S),
    "self_attn_mask": CAUSAL & mask(B, 1, T, T), "cross_attn_mask": mask(B, 1, 1, S),
    "cross_mask": additive(mask(B, 1, 1, S)),
    "tokens": ids(B, T), "src": ids(B, S, below=41), "tgt": ids(B, T),
    "src_mask": mask(B, 1, 1, S), "tgt_mask": CAUSAL[None, None],
    "seq": ids(B, S, below=4), "lengths": np.array([1, 8, 5]),
    "positions": np.arange(T)[None], "distance": np.arange(T) - np.arange(T)[:, None],
    "query_vector": normal(6), "keys": normal(S, 6), "values": normal(S, 9),
    "start_tokens": ids(B, 5),
}  # fmt: skip
# The family's masks and lengths, where they are not the ones above.
SELF = {"key": normal(B, T, D), "value": normal(B, T, D)}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "prepost": {**SELF, "mask": mask(B, 1, T, T).astype(int)},
    "encdec": {},
    "charlm": {},
    "unified": {"mask": additive(CAUSAL & mask(B, 1, T, T))},
    "minimal": {"mask": mask(B, N, T, T).astype(float)},
}
IN_BLOCK = {"mask": mask(B, 1, T, T)}
CROSS = {"mask": additive(mask(B, 1, 1, S))}
# Other ways to call or to construct a row, each run as well: inputs and settings that differ.
VARIANTS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "prepost": {"MultiHeadAttention": [{}, {"mask": CAUSAL}]},
    "encdec": {
        "MultiHeadAttention": [{}, {"mask": None}],
        "RelativePositionalAttention": [{}, {"mask": None}, {"max_relative_position": 15}],
        "MultiQueryAttention": [{}, {"mask": None}],
        **{name: [IN_BLOCK, {"mask": None}]
           for name in ("EncoderLayer", "TransformerEncoder", "GPTBlock")},
        "DecoderLayer": [{}, {"self_attn_mask": None, "cross_attn_mask": None}],
        "TransformerDecoder": [{}, {"self_attn_mask": None, "cross_attn_mask": None}],
        "Transformer": [{}, {"src_mask": None, "tgt_mask": None}],
    },
    "charlm": {
        name: [{}, {"config": {**SETTINGS["config"], "use_bias": True, "head_size": 5}}]
        for name in ("AttentionHead", "MultiHeadAttention", "Block")
    },
    "unified": {
        **{name: [{"kv_input": None}, CROSS]
           for name in ("MultiHeadAttention", "MultiQueryAttention", "GroupedQueryAttention")},
        "ALiBi": [{}, {"n_heads": 6}],
        "FeedForward": [{}, {"d_ff": None}],
        "SwiGLUFFN": [{}, {"d_ff": None}],
    },
}  # fmt: skip
BRANCHES = ("attention_residual_dropout", "feed_forward_residual_dropout")
ATTENTION, FEED_FORWARD = BRANCHES
WEIGHTS = "attention.attention_dropout"
PREPOST = [WEIGHTS, *BRANCHES]
ENCODER = ["attention.output_dropout", ATTENTION, "feed_forward.hidden_dropout", FEED_FORWARD]
DECODER = [
    *ENCODER[:2], "cross_attention.output_dropout", "cross_attention_residual_dropout", *ENCODER[2:]
]  # fmt: skip
GPT = ["attention.output_dropout", "feed_forward.hidden_dropout"]
CHARLM = [WEIGHTS] * N + ["attention.output_dropout", "feed_forward.output_dropout"]
GATED = [WEIGHTS, ATTENTION, "feed_forward.output_dropout", FEED_FORWARD]
PLAIN = [WEIGHTS, ATTENTION, "feed_forward.hidden_dropout", *GATED[2:]]
MINIMAL = [WEIGHTS, ATTENTION, "feed_forward.hidden_dropout", FEED_FORWARD]


def stack(places: list[str], layers: int, path: str = "blocks") -> list[str]:
    return [f"{path}.{layer}.{place}" for layer in range(layers) for place in places]


# Where each class drops, in the order in which it does, by our paths.
PLACES: dict[str, dict[str, list[str]]] = {
    "prepost": {
        "MultiHeadAttention": ["attention_dropout"],
        "TransformerBlock": PREPOST,
        "PostNormTransformerBlock": PREPOST,
        "PreNormTransformerBlock": PREPOST,
    },
    "encdec": {
        "MultiHeadAttention": ["output_dropout"],
        "PositionalEncoding": ["1"],
        "LearnedPositionalEmbedding": ["1"],
        "FeedForward": ["hidden_dropout"],
        "EncoderLayer": ENCODER,
        "TransformerEncoder": stack(ENCODER, 2),
        "DecoderLayer": DECODER,
        "TransformerDecoder": stack(DECODER, 2),
        "Transformer": [
            "source_embedding_dropout", *stack(ENCODER, 2, "encoder.blocks"),
            "target_embedding_dropout", *stack(DECODER, 3, "decoder.blocks"),
        ],
        "GPTBlock": GPT,
        "GPT": ["embedding_dropout", *stack(GPT, 2)],
        "RelativePositionalAttention": [],
        "MultiQueryAttention": ["attention_dropout"],
    },
    "charlm": {
        "AttentionHead": ["attention_dropout"],
        "MultiHeadAttention": ["attention_dropout"] * N + ["output_dropout"],
        "FeedForward": ["output_dropout"],
        "Block": CHARLM,
    },
    "unified": {
        **{name: ["attention_dropout"]
           for name in ("MultiHeadAttention", "MultiQueryAttention", "GroupedQueryAttention")},
        **{name: [] for name in ("SinusoidalPE", "LearnedPE", "RoPE", "ALiBi")},
        "FeedForward": ["hidden_dropout", "output_dropout"],
        "SwiGLUFFN": ["output_dropout"],
        "TransformerBlock": PLAIN,
        "Transformer": ["embedding_dropout", *stack(PLAIN, 2)],
        "gpt2_small": ["embedding_dropout", *stack(PLAIN, 2)],
        "llama_style": ["embedding_dropout", *stack(GATED, 2)],
    },
    "minimal": {
        "MinimalAttention": ["attention_dropout"],
        "FeedForward": ["hidden_dropout"],
        "TransformerBlock": MINIMAL,
    },
}  # fmt: skip


def places_of(row: Row) -> list[str]:
    places = PLACES[row.family][row.name]
    return GATED if places is PLAIN and "Gated" in row.candidate[0] else places


def arguments_of(row: Row, variant: dict[str, Any]) -> dict[str, Any]:
    return {**INPUTS, **OF_FAMILY[row.family], **variant}


def is_module(row: Row) -> bool:
    """Whether the row's class is a torch module; the others are functions and plain classes."""
    return row.name in PLACES[row.family]


def variants_of(row: Row) -> list[dict[str, Any]]:
    """The inputs and settings of each run, as far as they differ from the common ones."""
    return VARIANTS.get(row.family, {}).get(row.name, [{}])


MODULE_ROWS = [row for row in ROWS if is_module(row)]
FUNCTION_ROWS = [row for row in ROWS if not is_module(row)]
