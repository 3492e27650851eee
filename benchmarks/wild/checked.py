"""What a person saw who read both sources at a root cause."""

BERT = "transformers/models/bert/modeling_flax_bert.py"
ELECTRA = "transformers/models/electra/modeling_flax_electra.py"
GPT2 = "transformers/models/gpt2/modeling_flax_gpt2.py"
LLAMA = "transformers/models/llama/modeling_flax_llama.py"
MISTRAL = "transformers/models/mistral/modeling_flax_mistral.py"
BART = "transformers/models/bart/modeling_flax_bart.py"
BLENDERBOT_SMALL = "transformers/models/blenderbot_small/modeling_flax_blenderbot_small.py"
DINOV2 = "transformers/models/dinov2/modeling_flax_dinov2.py"
MARIAN = "transformers/models/marian/modeling_flax_marian.py"
RESNET = "transformers/models/resnet/modeling_flax_resnet.py"
# By package, and line of the root cause.
CHECKED: dict[tuple[str, str], str] = {
    ("transformers", f"{ELECTRA}:796"): (
        "token types that are not given are `jnp.ones_like`; the reference's are zeros."
    ),
    ("transformers", f"{ELECTRA}:176"): (
        "token types that are not given are `jnp.ones_like` (line 796); the reference's are zeros."
    ),
    ("transformers", f"{ELECTRA}:654"): (
        "the activation is the configuration's; the reference writes `get_activation('gelu')`."
    ),
    ("transformers", f"{BERT}:213"): (
        "positions are always added; the reference adds them only if the positions are absolute."
    ),
    ("transformers", f"{BERT}:369"): (
        "`position_embedding_type` is not read in the file; the reference adds the scores of "
        "relative positions."
    ),
    ("transformers", f"{GPT2}:262"): (
        "neither `scale_attn_weights` nor `scale_attn_by_inverse_layer_idx` is read in the file; "
        "the reference reads both."
    ),
    ("transformers", f"{LLAMA}:316"): (
        "the tables of positions have base 10,000 and no scaling, written at line 132; "
        "`rope_theta` and `rope_scaling` are not read."
    ),
    ("transformers", f"{MISTRAL}:250"): (
        "with `sliding_window=None`, line 243 takes `triu(k=0)` of a lower triangle, the diagonal: "
        "a token sees itself alone."
    ),
    ("transformers", f"{MISTRAL}:326"): (
        "line 243, `triu(k=-window)`, keeps a token more than the window; the reference does not."
    ),
    ("transformers", f"{MISTRAL}:243"): (
        "with `sliding_window=None`, this line takes `triu(k=0)` of a lower triangle, the "
        "diagonal: a token sees itself alone."
    ),
    ("transformers", f"{MISTRAL}:345"): (
        "it follows from line 243, whose mask is a diagonal with `sliding_window=None`; with "
        "`sliding_window=31` all is equal."
    ),
    ("transformers", f"{LLAMA}:693"): (
        "`tie_word_embeddings` is not read in the file: the head has a kernel of its own, which a "
        "tied checkpoint does not have, so it keeps its random numbers."
    ),
    **{
        ("transformers", f"{MARIAN}:{line}"): (
            "`share_encoder_decoder_embeddings` is not read in the file: encoder and decoder have "
            "one table (line 809), which the checkpoint does not have, so it keeps its random "
            "numbers."
        )
        for line in (711, 717, 770, 777)
    },
    ("transformers", f"{BART}:807"): (
        "in generation, line 1973 counts positions from the first token that is no padding; the "
        "reference's decoder counts from the first one (`position_ids=cache_position`)."
    ),
    ("transformers", f"{BLENDERBOT_SMALL}:770"): (
        "the decoder multiplies by `embed_scale`; the reference's has the attribute (line 849) and "
        "does not use it. The norm that follows hides it, but for its eps."
    ),
    ("transformers", f"{DINOV2}:178"): (
        "line 166 adds 0.1 to height and width before it takes the scale, as an older reference "
        "did; and the bicubic kernel of JAX has -0.5 where PyTorch's has -0.75."
    ),
    **{
        ("transformers", f"{RESNET}:{line}"): (
            "the two convolutions of a basic layer have no `name` (line 188), unlike those of a "
            "bottleneck: they are called `layer_0` and `layer_1`, the checkpoint's `layer.0` and "
            "`layer.1` are not loaded, and they keep their random numbers."
        )
        for line in (118, 177)
    },
    ("equimo", "equimo/layers/ffn.py:282"): (
        "`gelu` is `jax.nn.gelu`, whose default is the tanh form; timm's `nn.GELU` is erf. It is a "
        "default: `act_layer='exactgelu'` makes them equal."
    ),
    **{
        ("google-tunix", f"tunix/models/{place}"): (
            "the layers call `apply_rope` without a base, so it is always the default, 1,000,000; "
            "`rope_theta` of the configuration is not read. Llama 3 has 500,000."
        )
        for place in ("llama3/model.py:253", "qwen3/model.py:376")
    },
    **{
        ("google-tunix", f"tunix/models/llama3/model.py:{line}"): (
            "the frequencies are those of Llama 3.0; the configuration has no setting for the "
            "stretched ones of Llama 3.1 and 3.2, of which presets exist."
        )
        for line in (256, 265)
    },
    **{
        ("equimo", f"equimo/{place}"): (
            "the model's default `eps` is 1e-5, timm's is 1e-6. With `eps=1e-6` they are equal."
        )
        for place in ("layers/attention.py:542", "layers/attention.py:556", "models/vit.py:478")
    },
}
