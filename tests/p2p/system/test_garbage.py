"""What the collector does while modules load, and what it looks at afterwards: each in a process of its own."""

import subprocess
import sys

import pytest

COUNTED = """
import gc
seen = []
def note(phase, about):
    if phase == "start":
        seen.append(about["generation"])
gc.callbacks.append(note)
"""


def printed(script: str) -> list[str]:
    """Words of the last line that the script prints."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_nothing_is_collected_while_a_command_is_loaded():
    """Without it: about 40 collections, of which some are of all that was loaded."""
    script = f"import atoll.cli.command_group\n{COUNTED}\natoll.cli.command_group.load('start')\n"
    assert printed(f"{script}print(len(seen), gc.isenabled(), gc.get_freeze_count() > 10_000)") == [
        "0",
        "True",
        "True",
    ]


def test_a_node_that_is_up_looks_at_nothing_that_was_loaded():
    script = """
import gc
from atoll.p2p.system.garbage import settle_garbage, uncollected_imports
with uncollected_imports():
    import atoll.node.daemon.app
loaded = gc.get_freeze_count()
looked = []
made = [[] for _ in range(1000)]
gc.callbacks.append(lambda phase, about: looked.append(len(gc.get_objects())) if phase == "start" else None)
settle_garbage()
print(len(looked), looked[0] < loaded / 4, gc.get_freeze_count() >= loaded + 1000, gc.isenabled())
"""
    assert printed(script) == ["1", "True", "True", "True"]


@pytest.mark.parametrize(("anew", "is_gone"), [(False, "False"), (True, "True")])
def test_what_was_left_out_is_looked_at_again_when_a_chain_has_ended(anew, is_gone):
    script = f"""
import gc, weakref
from atoll.p2p.system.garbage import settle_garbage
class Part:
    pass
part = Part()
part.own, seen = part, weakref.ref(part)
settle_garbage()
del part
settle_garbage(anew={anew})
print(seen() is None)
"""
    assert printed(script) == [is_gone]


def test_who_loads_nothing_leaves_nothing_out():
    script = """
import gc
from atoll.p2p.system.garbage import uncollected_imports
with uncollected_imports():
    import sys
print(gc.get_freeze_count(), gc.isenabled())
"""
    assert printed(script) == ["0", "True"]
