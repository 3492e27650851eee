"""What a user writes, for a type checker; it is not run."""

from pathlib import Path
from typing import assert_type

import numpy as np

import jaxformer as jf


def write(path: Path) -> str:
    """Loads a model, writes with it, and saves it."""
    model = jf.load(path)
    assert_type(model, jf.Model)
    text = model.generate("The ", 20, temperature=0.5)
    assert_type(text, str)
    assert_type(model.generate([1, 2, 3], 20), np.ndarray)
    assert_type(model.save("model.safetensors"), Path)
    return text


def learn(text: Path) -> jf.TransformerLMConfig:
    """Trains a preset on a text."""
    result = jf.train("nano", data=str(text), steps=20)
    assert_type(result, jf.TrainResult)
    assert_type(result.val_loss, float | None)
    try:
        return result.config.model
    except jf.errors.DivergedError as error:
        raise SystemExit(error.exit_code) from error
