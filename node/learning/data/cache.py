"""The cache folder of fetched texts: one a user, shared by all nodes."""

import os
from pathlib import Path

import platformdirs


def default_cache() -> Path:
    """`$ATOLL_CACHE`, or the platform's cache folder for atoll."""
    chosen = os.environ.get("ATOLL_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("atoll"))
