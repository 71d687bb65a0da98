"""Completion as a shell asks for it: a process with click's variables, that loads nothing heavy."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from atoll.cli.command_table import SHOWN
from atoll.cli.node_commands.completion import SHELLS, script
from atoll.node.config.config_keys import config_keys
from tests.cli.test_main import HEAVY

ASK = """
import sys
from atoll.cli.main import main
sys.argv[0] = "atoll"
try:
    main([], name="atoll")
finally:
    print("loaded", *sorted(sys.modules))
"""


def completed(line: str, home: str = "/nowhere") -> tuple[list[str], set[str]]:
    """What a bash gets for the last word of `line`, and the modules that were loaded for it."""
    words = line.split(" ")
    asked = {"_ATOLL_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    ran = subprocess.run(
        [sys.executable, "-c", ASK], env=os.environ | asked | {"ATOLL_HOME": home},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    *found, loaded = ran.stdout.splitlines()
    return [line.partition(",")[2] for line in found], set(loaded.split())


def test_commands_come_from_the_table_and_none_is_imported():
    found, loaded = completed("atoll ")
    assert found == SHOWN
    assert not loaded & (HEAVY - {"difflib"})
    assert completed("atoll st")[0] == ["start", "stop", "status"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("atoll run sh", ["show"]),
        ("atoll peer ", ["list", "exclude"]),
        ("atoll model e", ["eval", "export"]),
        ("atoll stop --w", ["--wait", "--within"]),
        ("atoll start --det", ["--detach"]),
        ("atoll start --role e", ["evaluate"]),
        ("atoll completion ", list(SHELLS)),
        ("atoll config get limits.mo", ["limits.monthly", "limits.monthly_start_day"]),
        ("atoll config set ", [key.name for key in config_keys()]),
    ],
)
def test_words_of_commands(line, found):
    assert completed(line)[0] == found


def test_names_of_runs(atoll, tmp_path):
    for name in ("tiny", "tidal", "other"):
        atoll("run", "new", name, "--data", "synthetic:markov")
    home = str(tmp_path / "home")
    assert completed("atoll start --run ti", home)[0] == ["tidal", "tiny"]
    assert completed("atoll run rm o", home)[0] == ["other"]
    assert completed(f"atoll --home {home} run rm o")[0] == ["other"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_that_the_shell_reads(atoll, tmp_path, shell):
    ran = atoll("completion", shell)
    assert ran.code == 0
    assert f"{shell}_complete" in ran.out
    assert "_ATOLL_COMPLETE" in ran.out
    assert json.loads(atoll("completion", shell, "--json").out) == {"shell": shell, "script": script(shell)}
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"THE SCRIPT IS NOT READ HERE: no {shell}")
    path = tmp_path / "script"
    path.write_text(ran.out)
    subprocess.run([program, "-n", str(path)], check=True)
    assert atoll("completion", "tcsh").code == 2


def test_bash_completes_with_it(tmp_path):
    """The whole way: the script, the shell's own function, and our program on PATH."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("COMPLETION IS NOT TRIED IN A SHELL HERE: no bash")
    program = tmp_path / "atoll"
    body = "import sys\nfrom atoll.cli.main import main\nsys.argv[0] = 'atoll'\nsys.exit(main())"
    program.write_text(f"#!{sys.executable}\n{body}\n")
    program.chmod(0o755)
    lines = (
        script("bash"),
        "COMP_WORDS=(atoll sta); COMP_CWORD=1",
        "_atoll_completion atoll sta",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    )
    ran = subprocess.run(
        [bash, "--norc", "-c", "\n".join(lines)], env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout.split() == ["start", "status"]
