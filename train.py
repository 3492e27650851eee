"""Trains a character language model: ``uv run train.py --help`` says how."""

import sys

from jaxformer.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
