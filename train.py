"""Trains a character language model; ``uv run train.py --help`` lists the options."""

import signal
import sys

# While modules are imported an interrupt ends the process: as an exception it could be lost in one.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from jaxformer.hardware.huge_pages import reexec_with_huge_pages

if __name__ == "__main__":
    reexec_with_huge_pages()

from jaxformer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
