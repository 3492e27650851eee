"""Teaches a model a new text with adapters alone (LoRA), and writes them as the package peft does.

    uv run python examples/finetune_lora.py BASE --data novel.txt

BASE is any checkpoint that jaxformer reads: a Hugging Face folder, a .pt or .safetensors file, or a
run. Without it the script trains a small Llama first.
"""

import argparse
from pathlib import Path

import jaxformer as jf


def make_base(folder: Path, steps: int) -> Path:
    """Returns a Hugging Face folder with a small Llama, trained on the documentation of Python."""
    result = jf.train("llama-style", folder / "first", steps=steps, sample_tokens=0)
    return result.model.save(folder / "base", format="hf", dialect="llama", overwrite=True)


def main() -> None:
    """Trains adapters, and writes them and the merged model."""
    parser = argparse.ArgumentParser(description="Train adapters alone (LoRA).")
    parser.add_argument("base", type=Path, nargs="?", help="the checkpoint to start from")
    parser.add_argument("--data", default="python-docs", help="the text to learn")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    options = parser.parse_args()
    base = options.base or make_base(options.out, options.steps)

    result = jf.train(
        out=options.out / "tuned",
        init_from=base,
        data=options.data,
        steps=options.steps,
        lora_rank=4,
        lora_alpha=8.0,
        lora_targets="q_proj,v_proj",
        learning_rate=2e-3,
        min_learning_rate=2e-4,
        sample_tokens=0,
    )
    print(result)
    adapter = result.model.save(options.out / "adapter", format="peft", overwrite=True)
    print(f"for peft: {adapter}")
    merged = result.model.save(options.out / "merged", format="hf", overwrite=True)
    print(f"one model, adapters added to its weights: {merged}")


if __name__ == "__main__":
    main()
