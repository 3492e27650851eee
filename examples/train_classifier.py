"""Trains a classifier of texts, a BERT of Hugging Face, and writes it back.

    uv run --extra hf --extra torch python examples/train_classifier.py

The labels say whether a line is Python code or English: code of the standard library and the
documentation that every Python carries. transformers makes a small model with random weights; with
a folder of your own in its place the rest stays as it is. ``jaxformer.load`` ports it, optax trains
it, and transformers computes the same scores with what was saved.
"""

import argparse
import inspect
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from transformers import BertConfig, BertForSequenceClassification

import jaxformer as jf

LABELS = ("prose", "code")
LENGTH = 48
# Ids of bytes begin after that of padding.
PADDING, VOCABULARY = 0, 257


def read_lines() -> list[list[str]]:
    """Returns lines of prose, and lines of code."""
    prose = [line for text in topics.values() for line in text.splitlines()]
    code = [
        line for module in (argparse, inspect) for line in inspect.getsource(module).split("\n")
    ]
    return [[line.strip() for line in each if len(line) > 20] for each in (prose, code)]


def make_ids(lines: list[str]) -> np.ndarray:
    """Returns the ids of lines (B, T), padded on the right."""
    ids = np.full((len(lines), LENGTH), PADDING, np.int32)
    for row, line in zip(ids, lines, strict=True):
        read = np.frombuffer(line.encode()[:LENGTH], np.uint8)
        row[: len(read)] = read + 1
    return ids


@nnx.jit
def train_step(
    model: jf.TransformerClassifier,
    optimizer: nnx.Optimizer,
    ids: jax.Array,
    labels: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """Makes one update, and returns the loss before it."""

    def loss_of(model: jf.TransformerClassifier) -> jax.Array:
        jf.seed_dropout(model, key)
        loss = jf.cross_entropy(model(ids, jf.padding_mask(ids, PADDING)), labels)
        jf.seed_dropout(model, None)
        return loss

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def main() -> None:
    """Makes, ports, trains and saves the model."""
    parser = argparse.ArgumentParser(description="Train a classifier of texts.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/classifier"))
    options = parser.parse_args()

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=LENGTH, pad_token_id=PADDING,
        id2label=dict(enumerate(LABELS)), label2id={name: n for n, name in enumerate(LABELS)},
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(options.out / "first")

    model = jf.load(options.out / "first").module
    assert isinstance(model, jf.TransformerClassifier)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    lines = read_lines()
    rng = np.random.default_rng(0)

    def draw(count: int) -> tuple[jax.Array, jax.Array]:
        labels = rng.integers(0, 2, count)
        ids = make_ids([rng.choice(lines[label]) for label in labels])
        return jnp.asarray(ids), jnp.asarray(labels)

    model.train()
    for step in range(1, options.steps + 1):
        loss = train_step(model, optimizer, *draw(32), jax.random.key(step))
        if step % 50 == 0 or step == options.steps:
            print(f"step {step}: loss {loss:.3f}")

    model.eval()
    ids, labels = draw(256)
    scores = model(ids, jf.padding_mask(ids, PADDING))
    print(f"right: {float(jnp.mean(jnp.argmax(scores, -1) == labels)):.0%} of 256 lines")

    folder = jf.Model(model).save(
        options.out / "trained", format="hf", dialect="bert", overwrite=True
    )
    reference = BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        tokens = torch.from_numpy(np.array(ids))
        expected = reference(tokens, attention_mask=tokens != PADDING).logits.numpy()
    print(f"{folder}: scores differ from transformers' by {np.abs(scores - expected).max():.1e}")


if __name__ == "__main__":
    main()
