"""A fold passes where the states do not fit the memory, and gives the same bits. Under a real control group."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from atoll.node.runs.presets import preset
from atoll.protocols import codec
from atoll.protocols.run.run_spec import RunSpec
from tests.chaos.memory_group import memory_group
from tests.chaos.report import NotRun
from tests.node.worker.folding import fold_memory
from tests.node.worker.session_home import ME, SPEC

MODEL = msgspec.structs.replace(
    SPEC.model, dim=512, layers=12, heads=4, kv_heads=4, ffn=680, vocab=4096, context=64
)  # fmt: skip
"""27 million parameters: 110 MB each for Θ_final, the view, what a fold makes, and two U."""


def fold_under(limit_bytes: int, spec: RunSpec, folder: Path) -> dict[str, object]:
    """What `fold_memory.py` prints. Its libraries are loaded before the limit is there."""
    script = Path(fold_memory.__file__)
    try:
        with memory_group("fold") as group:
            group.set_limit(limit_bytes)
            command = [sys.executable, str(script), codec.encode(spec).hex(), str(folder)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                group.add(process.pid)
                out, _ = process.communicate("\n")
            assert process.returncode == 0, f"ended by {process.returncode}, {group.kills} for lack of memory"
            return dict(json.loads(out))
    except NotRun as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    ("name", "limit_mb"),
    [("27M", 520), pytest.param("125m", 1500, marks=pytest.mark.measure)],
)
def test_states_that_do_not_fit_are_folded_with_the_same_digests(tmp_path, name, limit_mb):
    """At 27M parameters five arrays and the process itself would take 800 MB, at 125M 2,900."""
    spec = preset(name, ME, 1) if name == "125m" else msgspec.structs.replace(SPEC, model=MODEL)
    states = fold_memory.expected(spec, tmp_path)
    found = fold_under(limit_mb * 10**6, spec, tmp_path)
    print(found["most_anonymous"])
    assert found["states"] == states
