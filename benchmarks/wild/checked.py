"""What a person saw who read both sources at a root cause."""

BERT = "transformers/models/bert/modeling_flax_bert.py"
ELECTRA = "transformers/models/electra/modeling_flax_electra.py"
GPT2 = "transformers/models/gpt2/modeling_flax_gpt2.py"
LLAMA = "transformers/models/llama/modeling_flax_llama.py"
MISTRAL = "transformers/models/mistral/modeling_flax_mistral.py"
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
