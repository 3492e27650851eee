"""Folders of the user that all runs share."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Returns the folder for what can be made or fetched again.

    A path that is not absolute counts as none, as the XDG Base Directory Specification has it.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "jaxformer"


def is_private(folder: Path) -> bool:
    """Returns whether nobody else can write to a folder, so that programs in it can be run."""
    about = folder.stat()
    return about.st_uid == os.getuid() and not about.st_mode & 0o022
