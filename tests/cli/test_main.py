"""The command table, help, exit codes: every failure is one line."""

import contextlib
import errno
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import click
import pytest

from atoll.cli.command_group import cli, load
from atoll.cli.command_table import COMMANDS, MOVED, NOUNS, SHOWN
from tests.waiting import HANGS_S


def test_every_listed_command_exists_with_the_listed_line(atoll):
    for name, (_, line) in COMMANDS.items():
        command = cli.get_command(click.Context(cli), name)
        assert isinstance(command, click.Command), name
        assert command.name == name
        assert line.endswith(".")


def leaf_commands(command: click.Command, ctx: click.Context, path: tuple[str, ...] = ()):
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            yield from leaf_commands(command.get_command(ctx, name), ctx, (*path, name))
    else:
        yield path, command


def test_every_command_speaks_json_in_a_home():
    """`sim` has homes of its own; a checkpoint is a folder that belongs to no home."""
    homeless = (
        ("sim",),
        ("bench",),
        ("checkpoint", "join"),
        ("checkpoint", "show"),
        ("data", "pack"),
        ("data", "show"),
    )
    for path, command in leaf_commands(cli, click.Context(cli)):
        options = {option for param in command.params for option in param.opts}
        assert any("--json" in param.opts and param.is_flag for param in command.params), path
        assert "--home" in options or path in homeless, path
        assert command.help, path


@pytest.mark.parametrize(
    "command", [("run", "list"), ("doctor",), ("status", "--last"), ("run", "rm", "t", "--yes")]
)
def test_the_home_of_another_user_is_a_line(atoll, monkeypatch, command):
    """Who started a node by `sudo` once: most commands look at paths there before they open any."""
    real = Path.stat

    def refused(self: Path, **how: bool) -> os.stat_result:
        if "runs" in self.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self, **how)

    monkeypatch.setattr(Path, "stat", refused)
    ran = atoll(*command)
    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert "Permission denied; check who owns it" in ran.err


LINES_OF_HELP = 36
"""With the sections' titles, and one for each of 20 commands."""


def test_help_fits_a_small_screen(atoll):
    ran = atoll("--help")
    assert ran.code == 0
    assert len(ran.out.splitlines()) <= LINES_OF_HELP
    assert all(f"  {name} " in ran.out for name in SHOWN)
    assert not any(f"  {name} " in ran.out for name in MOVED)
    assert [line for line in ran.out.splitlines() if line in ("Every day:", "By subject:", "More:")] == [
        "Every day:", "By subject:", "More:",
    ]  # fmt: skip


def test_a_verb_of_a_noun_is_the_command_that_it_was(atoll, daemon):
    for old, now in MOVED.items():
        assert cli.get_command(click.Context(cli), now.split()[0]) is not None, old
    for noun, verbs in NOUNS.items():
        group = cli.get_command(click.Context(cli), noun)
        for verb, place in verbs.items():
            assert group.get_command(click.Context(group), verb) is load(place)
    assert atoll("peer", "list").out == atoll("peers").out
    assert atoll("run", "rounds", "-n", "1").out == atoll("rounds", "-n", "1").out
    assert atoll("node", "status", "--json").out == atoll("status", "--json").out
    assert "  list " in atoll("peer", "--help").out
    assert "Usage: atoll peer list" in atoll("peer", "list", "--help").out


def test_an_old_spelling_has_a_hint_for_people_and_none_for_scripts(atoll, daemon, monkeypatch):
    assert atoll("peers").err == ""
    monkeypatch.setattr("atoll.cli.command_group.for_people", lambda: True)
    ran = atoll("peers")
    assert (ran.code, ran.err) == (0, "hint: this is now `atoll peer list`\n")
    assert atoll("status").err == ""


HEAVY = {"asyncio", "difflib", "importlib.metadata", "numba", "numpy", "rich", "torch", "uvloop"}
RUN_VERBS = ([], ["new"], ["list"], ["show"], ["find"], ["exclude"], ["rm"])
HELP = (["node"], ["peer"], ["model"], ["doctor"], ["sim"], ["top"], ["model", "export"])
LOADED = """
import sys
before = set(sys.modules)
from atoll.cli.main import main
main(sys.argv[1:])
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize(
    ("args", "also"),
    [
        (["--help"], {"msgspec", "platformdirs", "socket"}),
        (["status"], {"tomllib", "subprocess"}),
        *((["run", *words, "--help"], set()) for words in RUN_VERBS),
        *(([*words, "--help"], set()) for words in HELP),
    ],
)
def test_light_commands_load_nothing_heavy(tmp_path, args, also):
    """Each of these takes as long as all of `--help`; `atoll bench cli` measures the start."""
    home = ["--home", str(tmp_path / "home")]
    ran = subprocess.run([sys.executable, "-c", LOADED, *home, *args], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.splitlines()[-1].split())
    assert "click" in loaded
    assert not loaded & (HEAVY | also)


LATE = """
import atexit, os, signal, sys
from atoll.cli.main import main
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
sys.exit(main(sys.argv[1:]))
"""


def test_a_request_to_end_that_comes_late_changes_no_exit_code(tmp_path):
    home = ("--home", str(tmp_path / "home"))
    assert subprocess.run([sys.executable, "-c", LATE, *home, "status"], capture_output=True).returncode == 3


@pytest.mark.parametrize("words", [["--help"], ["config", "list"], ["run", "list", "--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_full_is_one_line(tmp_path, words, unbuffered):
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "atoll.cli.main", "--home", str(tmp_path / "home"), *words],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (1, "error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("words", [["--help"], ["config", "list"], ["run", "list", "--json"]])
def test_an_output_that_nobody_reads_is_quiet_and_no_success(tmp_path, words):
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "wb") as gone:
        ran = subprocess.run(
            [sys.executable, "-m", "atoll.cli.main", "--home", str(tmp_path / "home"), *words],
            stdout=gone, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_stream_that_is_closed_is_no_file_of_the_node(tmp_path, closed):
    """`>&-`: its lock or its ledger was what is printed to; the event loop of `start` ended by SIGABRT."""
    code = "import os, sys; os.close(int(sys.argv[1])); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
    words = ("-m", "atoll.cli.main", "--home", str(tmp_path / "h"), "start", "atoll:aiadovxasftul6neatt34wfq")
    ran = subprocess.run(
        [sys.executable, "-c", code, str(closed), *words], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 78, ran.stderr
    assert ran.stderr.count("\n") == (closed != 2), "one line"


def test_what_the_terminal_cannot_show_is_a_mark():
    """`run rounds` ended with a traceback where the locale is not UTF-8."""
    code = "from atoll.cli import main; main._settle_streams(); print('a \\u2013 b')"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True,
        timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, b"a ? b\n"), ran.stderr


def test_version(atoll):
    assert atoll("--version").out.startswith("atoll 0.")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["statsu"], "Did you mean status?"),
        (["peres"], "Did you mean peer list?"),
        (["exclud"], "Did you mean peer exclude?"),
        (["status", "--jsno"], "--json"),
        (["rounds", "--last", "0"], "range"),
        (["run", "new"], "NAME"),
    ],
)
def test_wrong_usage_is_exit_2_with_a_hint(atoll, args, said):
    ran = atoll(*args)
    assert ran.code == 2
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_the_benches_come_with_the_repository(atoll, monkeypatch):
    assert "Measure NAME" in atoll("bench", "--help").out
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    ran = atoll("bench", "calls")
    assert ran.code == 78
    assert ran.err == (
        "error: `atoll bench`: not part of the plain install; `git clone` the repository; `make setup`\n"
    )
    assert atoll("--help").code == 0, "help looks for no extension"


def test_home_may_stand_before_or_after_the_command(atoll, tmp_path):
    other = str(tmp_path / "other")
    assert other in atoll("status", "--home", other).err
    assert str(tmp_path / "home") in atoll("status").err


def test_home_from_the_environment(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "atoll.cli.main", "status"],
        env=os.environ | {"ATOLL_HOME": str(tmp_path / "from-env")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.startswith(f"error: no node runs in {tmp_path}/from-env; it has no run: ")


def test_on_a_terminal_a_watched_status_is_drawn_over_the_one_before(daemon):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "atoll.cli.main", "status", "--watch", "--home", str(daemon.home.root)]
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 60, 200, 0, 0))
        watching = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"})
        os.close(theirs)
        shown = b""
        while shown.count(b"round 7 of 54") < 2:
            shown += terminal.read(4096)
        watching.send_signal(2)
        with contextlib.suppress(OSError):  # nobody has the other end open any more
            while more := terminal.read(4096):
                shown += more
        assert watching.wait(HANGS_S) == 130
    second = shown.split(b"round 7 of 54")[1]
    assert b"\x1b[1A" in second, "the cursor goes up between two"
    assert b"Traceback" not in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is shown again"


def test_interrupt_is_exit_130(daemon, tmp_path):
    watching = subprocess.Popen(
        [sys.executable, "-m", "atoll.cli.main", "status", "--watch", "--home", str(daemon.home.root)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watching.stdout.readline().startswith("round 7 of 54 | collecting")
    watching.send_signal(2)
    _, words = watching.communicate(timeout=HANGS_S)
    assert watching.returncode == 130
    assert "Traceback" not in words
