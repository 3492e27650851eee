"""The settings that ``--preset`` names, free of JAX."""

import dataclasses

from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.errors import Setting, UsageError, suggest
from jaxformer.training.config import PairTrainConfig, TrainConfig


def nano() -> TrainConfig:
    """Returns nanoGPT's recipe for a CPU, at twice its learning rate: 0.8 M parameters.

    ``train.py --preset nano --data tiny-shakespeare``, about a minute on 2 cores: validation loss
    1.820, 1.813 and 1.814 for seeds 1337, 1 and 2.
    With nanoGPT's own ``--learning-rate 1e-3`` it ends at 1.906; nanoGPT publishes 1.88, as the
    mean of 20 random batches.
    """
    return TrainConfig(
        model=_nanogpt(num_layers=4, num_heads=4, d_model=128, context_length=64, dropout=0.0),
        optimizer=OptimizerConfig(learning_rate=2e-3),
        batch_size=12,
        steps=2000,
    )


def baby() -> TrainConfig:
    """Returns nanoGPT's recipe for a GPU: 10.7 M parameters, hours on 2 cores.

    ``train.py --preset baby --data tiny-shakespeare``: validation loss 1.461 after 1,500 steps in
    bfloat16, which an H100 makes in 14 s; nanoGPT publishes 1.4697 nats/char for this recipe.
    """
    return TrainConfig(
        model=_nanogpt(num_layers=6, num_heads=6, d_model=384, context_length=256, dropout=0.2),
        batch_size=64,
        steps=5000,
    )


def char_lm() -> TrainConfig:
    """Returns a recipe for the ``charlm`` family: 10 layers, 12 heads, 768 wide.

    ``train.py --preset char-lm --data tiny-shakespeare``: 71 M parameters, no biases on q, k and v.
    Wants a GPU or TPU: in bfloat16 an H100 takes 28 s for 1,600 steps, where the validation loss is
    lowest, 1.496. From then on the model overfits so small a corpus.
    """
    model = TransformerLMConfig(
        num_layers=10,
        num_heads=12,
        d_model=768,
        context_length=256,
        qkv_bias=False,
        embedding_dropout=0.1,
        attention_dropout=0.1,
        output_dropout=0.1,
        feed_forward_dropout=0.1,
    )
    optimizer = OptimizerConfig(learning_rate=6e-4, min_learning_rate=6e-5)
    return TrainConfig(model=model, optimizer=optimizer, batch_size=32, steps=5000)


def gpt2_small() -> TrainConfig:
    """Returns a recipe for GPT-2's smallest model: 12 layers, 12 heads, 768 wide, 50257 tokens.

    ``train.py --preset gpt2-small --data FOLDER --dtype bfloat16``: 124 M parameters; wants a GPU
    or TPU. ``--attention-dropout 0`` lets a fused kernel compute attention, in a third of the
    memory: an H100 then makes 486 thousand tokens a second in batches of 64.
    """
    model = TransformerLMConfig(
        vocab_size=50257,
        num_layers=12,
        num_heads=12,
        d_model=768,
        context_length=1024,
        activation="gelu_tanh",
        embedding_dropout=0.1,
        attention_dropout=0.1,
        output_dropout=0.1,
        feed_forward_dropout=0.1,
    )
    optimizer = OptimizerConfig(
        learning_rate=6e-4, min_learning_rate=6e-5, beta2=0.95, warmup_steps=2000
    )
    return TrainConfig(model=model, optimizer=optimizer, batch_size=8, steps=100_000)


def llama_style() -> TrainConfig:
    """Returns a recipe for LLaMA's parts at the size of ``nano``, on a CPU: 0.8 M parameters.

    ``train.py --preset llama-style --data tiny-shakespeare``: RMS norms, SwiGLU, rotary positions,
    two query heads to a key/value head, no biases, an output head of its own. Its validation loss
    is 1.708 and 1.704 (seeds 1337 and 1).
    """
    return TrainConfig(
        model=_llama(
            num_layers=4, d_model=128, num_heads=4, num_kv_heads=2, d_ff=352, context_length=64
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3),
        batch_size=12,
        steps=2000,
    )


def llama_1b() -> TrainConfig:
    """Returns a recipe for TinyLlama 1.1B (arXiv 2401.02385, sections 2.2 and 2.3): 22 layers.

    ``train.py --preset llama-1b --data FOLDER --strategy mesh --fsdp N --dtype bfloat16 --remat
    dots --scan-layers``: steps of 2 M tokens. Wants GPUs or TPUs
    (docs/explanation/scale.md) and has not been trained here.
    """
    return TrainConfig(
        model=_llama(
            num_layers=22, d_model=2048, num_heads=32, num_kv_heads=4, d_ff=5632,
            context_length=2048, vocab_size=32000,
        ),
        optimizer=_llama_optimizer(4e-4),
        batch_size=1024,
        steps=100_000,
    )  # fmt: skip


def llama_7b() -> TrainConfig:
    """Returns a recipe for Llama 2 7B (arXiv 2307.09288, section 2.2; widths of its weights).

    ``train.py --preset llama-7b --data FOLDER --strategy mesh --fsdp N --dtype bfloat16 --remat
    full --scan-layers``: steps of 4 M tokens. Wants GPUs or TPUs
    (docs/explanation/scale.md) and has not been trained here.
    """
    return TrainConfig(
        model=_llama(
            num_layers=32, d_model=4096, num_heads=32, num_kv_heads=32, d_ff=11008,
            context_length=4096, vocab_size=32000,
        ),
        optimizer=_llama_optimizer(3e-4),
        batch_size=1024,
        steps=500_000,
    )  # fmt: skip


def llama_70b() -> TrainConfig:
    """Returns a recipe for Llama 2 70B (arXiv 2307.09288, section 2.2; widths of its weights).

    ``train.py --preset llama-70b --data FOLDER --strategy mesh --fsdp N --dtype bfloat16 --remat
    full --scan-layers``: steps of 4 M tokens. Wants GPUs or TPUs
    (docs/explanation/scale.md) and has not been trained here.
    """
    return TrainConfig(
        model=_llama(
            num_layers=80, d_model=8192, num_heads=64, num_kv_heads=8, d_ff=28672,
            context_length=4096, vocab_size=32000,
        ),
        optimizer=_llama_optimizer(1.5e-4),
        batch_size=1024,
        steps=500_000,
    )  # fmt: skip


def _nanogpt(
    *, num_layers: int, num_heads: int, d_model: int, context_length: int, dropout: float
) -> TransformerLMConfig:
    """A GPT as nanoGPT's train.py makes it: no biases, one rate at its four places of dropout."""
    return TransformerLMConfig(
        num_layers=num_layers,
        num_heads=num_heads,
        d_model=d_model,
        context_length=context_length,
        qkv_bias=False,
        output_bias=False,
        feed_forward_bias=False,
        norm_bias=False,
        embedding_dropout=dropout,
        attention_dropout=dropout,
        output_dropout=dropout,
        feed_forward_dropout=dropout,
    )


def _llama(
    *,
    num_layers: int,
    d_model: int,
    num_heads: int,
    num_kv_heads: int,
    d_ff: int,
    context_length: int,
    vocab_size: int | None = None,
) -> TransformerLMConfig:
    """A model of the LLaMA family (arXiv 2302.13971, section 2.2), norms with Llama 2's eps."""
    return TransformerLMConfig(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_model=d_model,
        d_ff=d_ff,
        context_length=context_length,
        activation="swiglu",
        norm="rms_norm",
        positions="rotary",
        qkv_bias=False,
        output_bias=False,
        feed_forward_bias=False,
        norm_bias=False,
        tie_embeddings=False,
    )


def _llama_optimizer(learning_rate: float) -> OptimizerConfig:
    """AdamW of arXiv 2302.13971, section 2.3, and arXiv 2307.09288, section 2.2."""
    return OptimizerConfig(
        learning_rate=learning_rate,
        min_learning_rate=learning_rate / 10,
        beta2=0.95,
        warmup_steps=2000,
    )


PRESETS = {
    "nano": nano,
    "baby": baby,
    "char-lm": char_lm,
    "gpt2-small": gpt2_small,
    "llama-style": llama_style,
    "llama-1b": llama_1b,
    "llama-7b": llama_7b,
    "llama-70b": llama_70b,
}

# Their vocabulary is that of a tokenizer, and not the characters of a text.
TOKEN_PRESETS = ("gpt2-small", "llama-1b", "llama-7b", "llama-70b")
# In tokens. A model's own context may be a hundred times as long.
FINE_TUNING_WINDOW = 1024


def find_preset(name: str) -> TrainConfig:
    """Returns the settings of a preset.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in PRESETS:
        raise UsageError(
            Setting("config", flag="preset", value=name or "''"),
            f" is unknown{suggest(name, PRESETS)}: choose among {', '.join(PRESETS)}",
        )
    return PRESETS[name]()


def check_tokenizer(preset: str, config: TrainConfig) -> None:
    """Checks that a new run of a preset for tokens says what makes tokens of its text.

    Raises:
        UsageError: it does not.
    """
    if preset in TOKEN_PRESETS and config.tokenizer is None and not config.data_is_tokens:
        raise UsageError(
            f"the preset {preset} is a model of tokens, and {config.data} is a text: say what "
            "makes tokens of it with ",
            Setting("tokenizer"),
            " (a tokenizer.json, a folder of Hugging Face, chars, or bytes), or start from a model "
            "with ",
            Setting("init_from"),
        )


def check_adapters(config: TrainConfig) -> None:
    """Checks that a new run from random weights trains no adapters, which would leave them so.

    Raises:
        UsageError: it does.
    """
    if config.model.lora.lora_rank is not None:
        raise UsageError(
            Setting("lora_rank"),
            " trains adapters alone, beside the weights of a model: name it with ",
            Setting("init_from"),
        )


def check_schedule(config: TrainConfig) -> None:
    """Checks that the learning rate of a new run falls after warm-up.

    Raises:
        UsageError: it would rise.
    """
    optimizer = config.optimizer
    first, last = optimizer.learning_rate, optimizer.min_learning_rate
    if optimizer.schedule != "constant" and last > first:
        raise UsageError(
            Setting("min_learning_rate", value=f"{last:g}"),
            " is more than ",
            Setting("learning_rate", value=f"{first:g}"),
            ": the rate would rise after warm-up; give a smaller one",
        )


def fit_vocabulary(preset: str, config: TrainConfig) -> TrainConfig:
    """Returns the settings of a preset for tokens without its own vocabulary.

    The model then has as many rows as the tokenizer of its data has tokens.
    """
    if preset not in TOKEN_PRESETS:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=None))


def fine_tuning(config: TrainConfig) -> TrainConfig:
    """Returns the settings with which weights of another run are trained further.

    The learning rate is 5e-5, as in transformers' ``TrainingArguments``, and decays to a tenth.
    Windows have at most 1,024 tokens; targets and sources are as long as they are.
    """
    is_cut = config.model.context_length > FINE_TUNING_WINDOW
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(
            config.optimizer, learning_rate=5e-5, min_learning_rate=5e-6, warmup_steps=20
        ),
        block_size=FINE_TUNING_WINDOW
        if is_cut and not isinstance(config, PairTrainConfig)
        else None,
    )
