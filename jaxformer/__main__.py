"""``python -m jaxformer`` is the ``jaxformer`` command."""

from jaxformer.cli import entry_point

if __name__ == "__main__":
    entry_point()
