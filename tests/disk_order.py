"""Watches fsync and rename, because a power loss cannot be tested: what has a name must be on the disk."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

UNFINISHED = (".new", ".part", ".bad", ".tmp")
"""Suffixes of names that promise nothing."""


class DiskOrder:
    """From its creation on, looks at every fsync, rename and link of this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.named: list[str] = []
        """Names that were given so far."""
        self.early: list[str] = []
        """Names of files that were not on the disk when they got it."""
        self._synced: dict[int, tuple[int, int]] = {}
        self._lost: dict[int, str] = {}
        """Folders by inode whose newest name a power loss would undo."""
        fsync = os.fsync

        def watched_fsync(descriptor: int) -> None:
            fsync(descriptor)
            status = os.fstat(descriptor)
            self._synced[status.st_ino] = _stamp(status)
            self._lost.pop(status.st_ino, None)

        patch.setattr(os, "fsync", watched_fsync)
        for name in ("replace", "rename", "link"):
            patch.setattr(os, name, self._watched(getattr(os, name)))

    def check(self, *names: str) -> None:
        """The files of these names got them in order, and their folders are on the disk too."""
        assert [name for name in names if name not in self.named] == [], self.named
        assert self.early == [], "named before they are on the disk"
        assert list(self._lost.values()) == [], "their folder is not on the disk"

    def _watched(self, naming: Any) -> Any:
        def watched(source: Any, target: Any) -> None:
            if Path(target).suffix not in UNFINISHED:
                self.named.append(Path(target).name)
                if not self._is_synced(Path(source)):
                    self.early.append(Path(target).name)
                self._lost[Path(target).parent.stat().st_ino] = Path(target).name
            naming(source, target)

        return watched

    def _is_synced(self, path: Path) -> bool:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode) and not all(map(self._is_synced, path.iterdir())):
            return False
        return self._synced.get(status.st_ino) == _stamp(status)


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size
