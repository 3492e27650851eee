"""``python -m jaxformer`` is the ``jaxformer`` command."""

import signal

# While modules are imported an interrupt ends the process: as an exception it could be lost in one.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from jaxformer.cli.main import entry_point

if __name__ == "__main__":
    entry_point()
