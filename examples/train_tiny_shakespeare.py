"""Trains a small GPT on Shakespeare and lets it write: a minute and a half on two cores.

    uv run python examples/train_tiny_shakespeare.py --download
    uv run python examples/train_tiny_shakespeare.py --data novel.txt --steps 200

tiny-shakespeare is looked for in the folder that JAXFORMER_DATA_DIR names and in the user cache;
``--download`` fetches it (1.1 MB, its SHA-256 is pinned).
"""

import argparse
from pathlib import Path

import jaxformer as jf


def main() -> None:
    """Trains, writes a text and says where everything is."""
    parser = argparse.ArgumentParser(description="Train a small GPT on Shakespeare.")
    parser.add_argument("--data", default="tiny-shakespeare", help="a corpus, or a text file")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("runs/shakespeare"))
    parser.add_argument("--download", action="store_true", help="fetch tiny-shakespeare")
    options = parser.parse_args()

    result = jf.train(
        "nano",
        options.out,
        data=options.data,
        steps=options.steps,
        download=options.download,
    )
    print(result)
    # The checkpoint with the lowest validation loss, which need not be the last one.
    print(result.best_model.generate("\n", 300, temperature=0.7))
    print(f"curves and samples: {options.out / 'report.html'}")


if __name__ == "__main__":
    main()
