"""A lower bound of the memory that a run needs, from its settings, before anything is allocated.

What a run needs exactly, ``jaxformer plan`` finds by compiling; this is arithmetic on Python's
integers, which no setting makes slow.
"""

from jaxformer.config import EncoderDecoderConfig, TransformerConfig, TransformerLMConfig
from jaxformer.errors import Setting, UsageError
from jaxformer.hardware.units import format_count, format_memory
from jaxformer.training.config import TrainConfig

# Of a parameter, and of each of its moments.
FLOAT32 = 4
# Of a run, over all devices: 16 PiB.
MOST_BYTES = 2**54


def count_matrices(model: TransformerLMConfig | EncoderDecoderConfig) -> int:
    """Returns how many parameters a model has, but for its biases and norms.

    Args:
        model: with ``vocab_size`` set, or its table counts as empty.
    """
    width = model.d_model
    if isinstance(model, EncoderDecoderConfig):
        block = _attention(model) + _feed_forward(model)
        decoder = model.num_decoder_layers * (block + _attention(model))
        encoder = _attention(model.encoder) + _feed_forward(model.encoder)
        rows = model.target_vocab_size * (1 if model.head.tie_embeddings else 2)
        rows += 0 if model.embedding.shared_embedding else model.source_vocab_size
        return decoder + model.num_encoder_layers * encoder + width * rows
    vocabulary = model.vocab_size or 0
    tables = vocabulary * (1 if model.head.tie_embeddings or model.head.head == "none" else 2)
    if model.position.positions == "learned" or model.position.learned_rows:
        tables += model.context_length + model.position.position_offset
    feed_forwards = sum(_feed_forward(model, layer) for layer in range(model.num_blocks))
    return model.num_blocks * _attention(model) + feed_forwards + width * tables


def _attention(model: TransformerConfig) -> int:
    """The parameters in the matrices of one attention."""
    part, width = model.attention.latent, model.head_width
    num_heads = model.attention.num_heads
    if part.latent_width is None:
        return 2 * model.d_model * width * (num_heads + model.key_value_heads)
    inner, turned = part.query_latent_width, part.rotary_head_dim
    queries = model.d_model * num_heads * width
    if inner is not None:
        queries = inner * (model.d_model + num_heads * width)
    kept = model.d_model * (part.latent_width + turned)
    made = part.latent_width * num_heads * (width - turned + model.value_width)
    return queries + kept + made + num_heads * model.value_width * model.d_model


def _feed_forward(model: TransformerConfig, layer: int = 0) -> int:
    """The parameters in the matrices of a layer's feed-forward, or of its router and experts."""
    matrices = 3 if model.feed_forward.is_gated else 2
    if not model.has_experts(layer):
        return matrices * model.d_model * model.feed_forward_width
    experts = model.feed_forward.experts
    count, shared = experts.num_experts or 0, experts.shared_expert_d_ff or 0
    rows = count + (1 if experts.shared_expert_gate else 0)
    return model.d_model * (matrices * (count * model.expert_width + shared) + rows)


def _read_by_windows(model: TransformerLMConfig | EncoderDecoderConfig) -> tuple[int, int]:
    """How many layers read every token of a window, and how many logits each of them has."""
    if isinstance(model, EncoderDecoderConfig):
        return model.num_decoder_layers, model.target_vocab_size
    return model.num_layers, model.vocab_size or 0


def _trains_adapters(model: TransformerLMConfig | EncoderDecoderConfig) -> bool:
    return model.lora.lora_rank is not None


def least_bytes(config: TrainConfig, devices: int) -> dict[str, int]:
    """Returns a lower bound of what every device must hold at once, in bytes.

    Args:
        config: with ``model.vocab_size`` set.
        devices: how many share the batch.

    Returns:
        ``state``: parameters, gradients and moments; ``batch``: what one micro-batch keeps for its
        gradient, the input of every block and the logits that are made at once, these as far as
        they are larger than the gradients, which come after them; ``starts``: where the windows of
        one call begin.
    """
    from jaxformer.execution.chunked_loss import positions_at_once

    model = config.model
    tokens = config.batch_size * config.window
    width = 2 if config.dtype == "bfloat16" else 4
    parameters = count_matrices(model) // (config.fsdp * config.tensor * config.expert)
    layers, vocabulary = _read_by_windows(model)
    inputs, logits = (
        width * tokens * numbers // (config.accumulation * devices)
        for numbers in (layers * model.d_model, vocabulary)
    )
    rows = config.batch_size // (config.accumulation * devices)
    at_once = positions_at_once(rows, config.window, vocabulary, width)
    logits = logits * at_once // config.window
    # Of adapters alone there are few.
    gradients = 0 if _trains_adapters(model) else width * parameters
    return {
        "state": _kept_bytes(config) * parameters + gradients,
        "batch": inputs + max(0, logits - gradients),
        "starts": 4 * config.steps_per_call * config.batch_size // devices,
    }


def _kept_bytes(config: TrainConfig) -> int:
    """The bytes that stay of each parameter at least: its own and those of its moments."""
    averages = config.optimizer.ema is not None
    if _trains_adapters(config.model):
        return FLOAT32
    return FLOAT32 * (1 + config.optimizer.kind.least + averages)


def check_countable(config: TrainConfig) -> None:
    """Checks that a run is not beyond all machines, and its sizes not beyond XLA's integers.

    Args:
        config: with ``model.vocab_size`` set.

    Raises:
        UsageError: it is.
    """
    needed = sum(least_bytes(config, 1).values())
    if needed > MOST_BYTES:
        raise UsageError(
            f"{format_count(count_matrices(config.model))} parameters and batches of "
            f"{config.batch_size:,} windows need {format_memory(needed)}, "
            "more than all machines there are"
        )


def check_memory(config: TrainConfig, devices: int, room: int | None) -> None:
    """Checks that a run can fit, before anything of it is allocated.

    Args:
        config: with ``model.vocab_size`` set.
        devices: how many it runs on, those of other processes too.
        room: the bytes that each of them has; None if unknown.

    Raises:
        UsageError: it cannot; the message has the numbers.
    """
    if room is None:
        return
    least = least_bytes(config, devices)
    if sum(least.values()) > room:
        parts = {
            "state": f"{format_count(count_matrices(config.model))} parameters with gradients and "
            f"moments {format_memory(least['state'])}",
            "batch": f"one micro-batch {format_memory(least['batch'])}",
            "starts": f"{config.steps_per_call:,} steps per call {format_memory(least['starts'])}",
        }
        largest = ", ".join(words for name, words in parts.items() if least[name] > room / 100)
        raise UsageError(
            f"this needs more memory than there is: {largest}, of {format_memory(room)} on each of "
            f"{devices} devices; use a smaller model, a smaller ",
            Setting("batch_size"),
            ", or more devices",
        )


def too_large_for_samples(config: TrainConfig, room: int | None) -> str | None:
    """Returns why no text can be written while training: one device holds the whole model for it.

    Args:
        config: with ``model.vocab_size`` set.
        room: the bytes that each device has; None if unknown.

    Returns:
        The reason with its numbers; None if there is room, or it is unknown how much there is.
    """
    whole = FLOAT32 * count_matrices(config.model)
    parameters = count_matrices(config.model) // (config.fsdp * config.tensor * config.expert)
    training = _kept_bytes(config) * parameters
    if room is None or whole + training <= room:
        return None
    return (
        f"no samples will be written: the whole model takes {format_memory(whole)} on one "
        f"device, beside {format_memory(training)} of training, and there are "
        f"{format_memory(room)} (jaxformer sample writes them later; "
        "--sample-tokens 0 turns them off)"
    )
