"""Every command line that a page quotes exists: the command, its words and flags; the target; the module."""

import importlib.util
import re
from collections.abc import Iterator

import click
import pytest

from atoll.cli.command_group import cli
from atoll.cli.command_table import COMMANDS
from tests.test_docs import PAGES, ROOT, name_of, text_of

SPAN = re.compile(r"`((?:atoll|node|make|python -m) [^`]+)`")
LINE = re.compile(r"^ {4,}(?:\$ )?(?:sudo )?((?:atoll|node|make|python -m) .+)$", re.M)
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
FENCED = re.compile(r"^\s*(?:\$ )?((?:atoll|node|make|python -m) .+)$", re.M)
COMMENT = re.compile(r"\s{2,}\S.*$|\s#.*$")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
ALTERNATIVES = re.compile(r"\s*\|\s*")
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))


def quoted(text: str) -> Iterator[str]:
    """The command lines of a page, without their comments; a line that goes on is one with the next."""
    text = re.sub(r"\\\n\s*", "", text)
    blocks = FENCE.findall(text)
    found = [
        *SPAN.findall(text),
        *LINE.findall(text),
        *(line for block in blocks for line in FENCED.findall(block)),
    ]
    for line in found:
        yield " ".join(COMMENT.sub("", line).split())


def words_of(line: str) -> list[str]:
    """`status | peers [--json]` -> `status|peers`, `--json`."""
    return ALTERNATIVES.sub("|", re.sub(r"[\[\]()]", " ", line)).split()


def options_of(command: click.Command) -> set[str]:
    return {option for param in command.params for option in (*param.opts, *param.secondary_opts)}


def is_placeholder(word: str) -> bool:
    return not re.fullmatch(r"[a-z][a-z-]*", word)


def wrong_with(line: str) -> str:
    """What does not exist in a command line of ours; empty if all of it does."""
    program, *words = words_of(line)
    ctx = click.Context(cli)
    while words and words[0] == "--home":
        words = words[2:]
    if not words or (program == "node" and words[0].split("|")[0] not in COMMANDS):
        return ""  # Node.js, or nothing to check
    known = options_of(cli) | {"--help", "-h"}
    for name in words[0].split("|"):
        if is_placeholder(name):
            continue
        command = cli.get_command(ctx, name)
        if command is None:
            return f"no command {name}"
        known |= options_of(command)
        arguments = words[1].split("|") if len(words) > 1 else []
        for argument in arguments:
            if is_placeholder(argument):
                continue
            if isinstance(command, click.Group):
                inner = command.get_command(ctx, argument)
                if inner is None:
                    return f"no command {name} {argument}"
                known |= options_of(inner)
                if isinstance(inner, click.Group) and len(words) > 2:  # `model export hf DIR`
                    for verb in filter(inner.commands.get, words[2].split("|")):
                        known |= options_of(inner.commands[verb])
            choices = [p.type.choices for p in command.params if isinstance(p.type, click.Choice) and p.nargs == 1]
            if name == "bench" and argument not in choices[0]:
                return f"no bench {argument}"
    missing = [flag for flag in FLAG.findall(line) if flag not in known]
    return f"no flag {', '.join(missing)}" if missing else ""


def wrong_with_make(line: str) -> str:
    names = [word for word in words_of(line)[1:] if not is_placeholder(word)]
    return "" if set(names) <= TARGETS else f"no target {sorted(set(names) - TARGETS)}"


def wrong_with_module(line: str) -> str:
    module = line.split()[2]
    ours = module.partition(".")[0] in ("tests", "atoll", "atoll_bench", "atoll_lab")
    return "" if not ours or importlib.util.find_spec(module) else f"no module {module}"


def judge(line: str) -> str:
    if line.startswith("make "):
        return wrong_with_make(line)
    return wrong_with_module(line) if line.startswith("python ") else wrong_with(line)


def test_the_rule_sees_what_does_not_exist():
    for line in ("atoll statsu", "atoll run nwe", "atoll status --jsno", "atoll bench call", "make tests"):
        assert judge(line), line
    for line in ("python -m tests.nothing", "atoll status | per", "node start INVITE --quick"):
        assert judge(line), line
    for line in ("node script.js", "atoll bench calls|blobs", "atoll stop [--finish]", "make rig ATTEMPTS=100"):
        assert not judge(line), line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_quoted_commands_exist(page):
    wrong = [f"{line}: {why}" for line in quoted(text_of(page)) if (why := judge(line))]
    assert not wrong, "\n".join(wrong)


def test_there_are_commands_to_check():
    lines = {line for page in PAGES for line in quoted(text_of(page))}
    assert len(lines) > 60, len(lines)


def all_options(command: click.Command) -> set[str]:
    inner = (command.get_command(click.Context(cli), name) for name in getattr(command, "commands", {}))
    return options_of(command).union(*map(all_options, inner))


def test_flags_that_are_quoted_alone_exist_somewhere():
    """In a command of ours, or in a program of tests/."""
    commands = [cli.get_command(click.Context(cli), name) for name in COMMANDS]
    known = options_of(cli).union({"--help"}, *map(all_options, commands))
    for path in (ROOT / "tests").rglob("*.py"):
        known |= set(re.findall(r'"(--[a-z][a-z-]+)"', text_of(path)))
    wrong = [
        f"{name_of(page)}: {flag}"
        for page in PAGES
        for flag in re.findall(r"`(--[a-z][a-z-]*)", text_of(page))
        if flag not in known
    ]
    assert not wrong, "\n".join(wrong)
