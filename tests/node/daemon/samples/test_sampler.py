"""A sample text can neither delay nor fail the node, whatever its process does."""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager

import pytest

from atoll.node.daemon.samples import sampler
from atoll.node.daemon.samples.sampler import WORDS, Sampler
from atoll.node.daemon.samples.written import ANSWER_BYTES, TEXT_CHARACTERS, printable
from tests.waiting import HANGS_S, eventually

SAYS = "import sys; open(sys.argv[1] + '/ran', 'a').write('x'); "
PID = "import os; open(sys.argv[1] + '/pid', 'w').write(str(os.getpid())); "
LONG_S = 20
"""Longer than a deadline and an end of the node, and short enough for a mutant."""
HANGS = SAYS + PID + f"import time; time.sleep({LONG_S}); open(sys.argv[1] + '/lived', 'w')"
FLOODS = SAYS + PID + f"[print('x' * {ANSWER_BYTES}, flush=True) for _ in range(1000)]"
CRASHES = SAYS + "import os; sys.stderr.write('no such kernel'); sys.stderr.flush(); os.kill(os.getpid(), 11)"


def answers(**fields) -> str:
    return SAYS + f"print({json.dumps(json.dumps(fields))})"


def sampler_of(folder, script: str, *, every_s: float = 0.01, never: str = "", obstacle=lambda: ""):
    return Sampler(
        command=(sys.executable, "-S", "-c", script, str(folder)),
        folder=folder / "run",
        every_s=every_s,
        never=never,
        obstacle=obstacle,
        wall=lambda: 1000.0,
    )


@asynccontextmanager
async def running(one: Sampler):
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        serving = group.create_task(one.serve())
        yield serving
        assert not serving.done(), "its process ended the node's part"
        serving.cancel()


def runs(folder) -> int:
    """How often the process ran."""
    there = folder / "ran"
    return len(there.read_text()) if there.exists() else 0


def is_alive(folder) -> bool:
    """Whether the process that wrote its number is still there."""
    try:
        os.kill(int((folder / "pid").read_text()), 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_text_is_shown_with_its_round_and_time(tmp_path):
    one = sampler_of(tmp_path, answers(round=7, text="To be,\nor not"))
    async with running(one):
        await eventually(lambda: one.shown.text)
    shown = one.shown
    assert (shown.round, shown.unix_s, shown.text, shown.why) == (7, 1000.0, "To be,\nor not", "")


async def test_a_text_is_bounded_and_has_no_controls(tmp_path):
    one = sampler_of(tmp_path, answers(round=7, text="\x1b[2J\u202e\n" + 600 * "x"))
    async with running(one):
        await eventually(lambda: one.shown.text)
    assert one.shown.text == "\ufffd[2J\ufffd\n" + (TEXT_CHARACTERS - 6) * "x"
    assert printable("é�\t") == "é\ufffd\ufffd"


async def test_what_is_not_written_leaves_the_text_before(tmp_path):
    one = sampler_of(tmp_path, answers(round=7, text="before"))
    async with running(one):
        await eventually(lambda: one.shown.text)
        one._command = (*one._command[:3], answers(why="the weights\nare gone"), str(tmp_path))
        one.on_event("final", {"round": 8})
        await eventually(lambda: one.shown.why)
    assert (one.shown.round, one.shown.text, one.shown.why) == (7, "before", "the weights are gone")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (CRASHES, "signal 11; see sample.log"),
        (SAYS + "print('warning: no JSON')", "exit code 0; see sample.log"),
        (answers(round="seven", text="x"), "exit code 0; see sample.log"),
        (answers(round=7), "the model wrote nothing"),
    ],
)
async def test_a_process_that_fails_is_a_line_and_the_node_goes_on(tmp_path, script, why):
    one = sampler_of(tmp_path, script)
    async with running(one):
        await eventually(lambda: one.shown.why)
        if script is CRASHES:  # the end of the next process may come before its words
            assert (tmp_path / "run" / WORDS).read_text() == "no such kernel"
        one.on_event("final", {"round": 8})
        await eventually(lambda: runs(tmp_path) == 2)
    assert why in one.shown.why
    assert one.shown.text == ""


async def test_a_process_that_hangs_is_ended_at_its_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "DEADLINE_S", 0.5)
    one = sampler_of(tmp_path, HANGS)
    async with running(one):
        await eventually(lambda: one.shown.why)
    assert "no time to spare" in one.shown.why
    assert not (tmp_path / "lived").exists()


async def test_one_that_writes_too_much_is_ended_and_shown_nowhere(tmp_path):
    one = sampler_of(tmp_path, FLOODS)
    async with running(one):
        await eventually(lambda: one.shown.why)
        assert not is_alive(tmp_path)
    assert one.shown.text == ""
    assert "signal 9" in one.shown.why, "nobody read the rest"


async def test_the_end_of_the_node_ends_the_process(tmp_path):
    one = sampler_of(tmp_path, HANGS)
    async with running(one):
        await eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        assert is_alive(tmp_path)
    assert not is_alive(tmp_path)
    assert not (tmp_path / "lived").exists(), "it did not end by itself"


async def test_one_that_cannot_start_is_a_line(tmp_path):
    (tmp_path / "run").write_text("a file")
    one = sampler_of(tmp_path, HANGS)
    async with running(one):
        await eventually(lambda: "cannot start" in one.shown.why)
    assert runs(tmp_path) == 0


async def test_it_writes_once_in_its_interval_however_many_rounds_become_final(tmp_path):
    one = sampler_of(tmp_path, answers(round=7, text="once"), every_s=HANGS_S)
    async with running(one):
        await eventually(lambda: one.shown.text)
        for number in range(50):
            one.on_event("final", {"round": number})
            await asyncio.sleep(0)
        for _ in range(4):  # another one would have begun by now
            other = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "")
            await other.wait()
        assert runs(tmp_path) == 1


async def test_it_writes_nothing_without_a_new_final_round(tmp_path):
    one = sampler_of(tmp_path, answers(round=7, text="once"), every_s=0.001)
    async with running(one):
        await eventually(lambda: one.shown.text)
        one.on_event("trained", {"round": 8})
        one.on_event("closed", {"round": 8})
        assert not one._has_news.is_set()
        one.on_event("final", {"round": 8})
        await eventually(lambda: runs(tmp_path) == 2)


async def test_what_stands_in_the_way_is_said_and_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "LOOK_S", 0.001)
    ways = ["the node is paused"]
    asked = []

    def obstacle() -> str:
        asked.append(1)
        return ways[0]

    one = sampler_of(tmp_path, answers(round=7, text="at last"), obstacle=obstacle)
    async with running(one):
        await eventually(lambda: len(asked) > 3 or runs(tmp_path))
        assert (one.shown.why, one.shown.text, runs(tmp_path)) == ("the node is paused", "", 0)
        ways[0] = ""
        await eventually(lambda: one.shown.text)
    assert one.shown.why == ""


async def test_a_node_that_never_writes_any_says_why_and_starts_nothing(tmp_path, caplog):
    one = sampler_of(tmp_path, HANGS, every_s=600, never="this node holds no model")
    async with asyncio.timeout(HANGS_S):
        await one.serve()
    assert (one.shown.why, runs(tmp_path)) == ("this node holds no model", 0)
    assert "no sample text: this node holds no model" in caplog.text
