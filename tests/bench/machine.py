"""The machine that a bench ran on, as far as it matters for figures."""

import os
import platform
from pathlib import Path
from typing import Any

import psutil


def machine() -> dict[str, Any]:
    """Facts for the report. Names nobody and no place."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
