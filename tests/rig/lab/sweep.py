"""What labs left behind whose process was killed: namespaces, and what runs inside."""

import os

from atoll_lab.lab import PREFIX
from atoll_lab.namespaces import FOLDER, Namespace


def sweep() -> list[str]:
    """Remove the namespaces of labs whose process is gone, with the processes inside; return their names."""
    removed = []
    for path in sorted(FOLDER.glob(f"{PREFIX}-*")) if FOLDER.is_dir() else []:
        owner = path.name.split("-")[1]
        if not os.path.exists(f"/proc/{owner}"):
            Namespace(path.name).remove()
            removed.append(path.name)
    return removed
