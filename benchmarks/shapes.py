"""A model of a shape that the command line gives, with its initial weights."""

import argparse
from typing import Any


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    layers: int = 6,
    width: int = 256,
    heads: int = 8,
    vocab_size: int = 65,
    context_length: int = 1024,
) -> None:
    """Adds the options of a shape, with these defaults."""
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--heads", type=int, default=heads)
    parser.add_argument("--vocab-size", type=int, default=vocab_size)
    parser.add_argument("--context-length", type=int, default=context_length)


def make_model(arguments: argparse.Namespace, **changes: Any) -> Any:
    """Returns a ``TransformerLM`` of that shape, in evaluation mode.

    Args:
        arguments: those of ``add_arguments``.
        changes: settings that are others.
    """
    from flax import nnx

    from jaxformer import TransformerLM
    from jaxformer.config import TransformerLMConfig

    settings = {
        "vocab_size": arguments.vocab_size,
        "d_model": arguments.width,
        "num_heads": arguments.heads,
        "num_layers": arguments.layers,
        "context_length": arguments.context_length,
    }
    model = TransformerLM(TransformerLMConfig(**{**settings, **changes}), rngs=nnx.Rngs(0))
    model.eval()
    return model
