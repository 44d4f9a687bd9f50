"""Folders that files are to be put into, looked at before that is worth anything."""

import os
from pathlib import Path


def obstacle_to(folder: Path) -> str | None:
    """Return why ``folder`` cannot be made, or nothing be put into it; None where it can.

    Nothing is made.

    Raises:
        OSError: it cannot be looked for.
    """
    folder = folder.absolute()
    found = next(place for place in (folder, *folder.parents) if _is_there(place))
    if not found.is_dir():
        return f"{found} is no folder"
    if not os.access(found, os.W_OK | os.X_OK):
        return f"{found} is not ours to write in"
    return None


def _is_there(place: Path) -> bool:
    """Tell whether there is anything by that name, were it a link to nothing."""
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
