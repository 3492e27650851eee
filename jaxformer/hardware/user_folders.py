"""Folders of the user that all runs share."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Returns the folder for what can be made or fetched again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxformer"
