"""Where what was made once is kept for other processes."""

import os
from pathlib import Path

import platformdirs


def user_cache() -> Path:
    """Return the directory; the environment variable ``SUSPENDED_SAMPLING_CACHE`` names another."""
    override = os.environ.get("SUSPENDED_SAMPLING_CACHE")
    return Path(override) if override else platformdirs.user_cache_path("suspended-sampling")
