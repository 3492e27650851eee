"""Brings nanoGPT's ckpt.pt to JAX, trains it further, and gives it back to nanoGPT.

    uv run python examples/port_your_nanogpt.py out-shakespeare-char/ckpt.pt --data input.txt

``meta.pkl``, the vocabulary, is looked for beside the checkpoint. Without an argument the script
trains a checkpoint of nanoGPT's kind first. PyTorch is not needed: a ``.pt`` file is read without
running any of its code.
"""

import argparse
from pathlib import Path

import jaxformer as jf


def make_checkpoint(folder: Path, data: str, steps: int) -> Path:
    """Returns a ckpt.pt as nanoGPT saves one."""
    result = jf.train("nano", folder / "first", data=data, steps=steps, sample_tokens=0)
    return result.model.save(folder / "ckpt.pt", dialect="nanogpt", overwrite=True)


def main() -> None:
    """Ports, trains and ports back."""
    parser = argparse.ArgumentParser(description="Bring nanoGPT's ckpt.pt to JAX and back.")
    parser.add_argument("checkpoint", type=Path, nargs="?", help="nanoGPT's ckpt.pt")
    parser.add_argument("--data", default="python-docs", help="the text to train on further")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/nanogpt"))
    options = parser.parse_args()
    checkpoint = options.checkpoint or make_checkpoint(options.out, options.data, options.steps)

    model = jf.load(checkpoint)
    print(model)
    print(model.generate("The ", 60, greedy=True))

    # The weights alone. Without fresh_optimizer AdamW's state comes along, and the steps go on.
    tuned = jf.train(
        out=options.out / "tuned",
        init_from=checkpoint,
        fresh_optimizer=True,
        data=options.data,
        steps=options.steps,
        learning_rate=1e-4,
        min_learning_rate=1e-5,
        sample_tokens=0,
    )
    print(tuned)
    # The names are those that the checkpoint came with; nanoGPT's --init_from=resume reads it.
    back = tuned.model.save(options.out / "back" / "ckpt.pt", overwrite=True)
    print(f"back in nanoGPT's form: {back}")


if __name__ == "__main__":
    main()
