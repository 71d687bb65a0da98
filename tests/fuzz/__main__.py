"""Look for bytes that break a decoder, guided by coverage (atheris, libFuzzer); `make test` has a short slice.

    pip install atheris          (no part of the dev extra: it has wheels for few Pythons and one platform)
    python -m tests.fuzz [NAME ...] [--seconds 60] [--keep DIR]

Each target has its own process, which begins with the examples and the corpus. Input that a decoder answers with
an error of another kind ends it: libFuzzer leaves the input in DIR, for tests/fuzz/corpus. Exit status 1 then.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LONGEST_BYTES = 8192
SPARE_S = 120
"""Until a process has imported everything; and what libFuzzer may take beyond its time."""


def fuzz_one(name: str, seconds: int, keep: Path) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    import atheris  # an extra

    with atheris.instrument_imports(include=["atoll"]):
        from tests.fuzz.targets import check, targets
    from tests.fuzz.test_decoders import CORPUS, folder_of

    target = targets()[name]
    with tempfile.TemporaryDirectory() as seeds:
        for number, example in enumerate(target.examples):
            (Path(seeds) / str(number)).write_bytes(example)
        folders = [seeds, *(str(folder) for folder in [CORPUS / folder_of(name)] if folder.exists())]
        limits = [f"-max_total_time={seconds}", f"-max_len={LONGEST_BYTES}", f"-artifact_prefix={keep}/"]
        atheris.Setup([sys.argv[0], *limits, *folders], lambda data: check(target, data))
        atheris.Fuzz()


def main(arguments: Sequence[str]) -> int:
    """Fuzz targets one after the other; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed: pip install atheris", file=sys.stderr)
        return 2
    if given.one:
        fuzz_one(given.names[0], given.seconds, given.keep)
    from tests.fuzz.targets import targets

    names = given.names or list(targets())
    if unknown := set(names) - set(targets()):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(targets())}")
    given.keep.mkdir(parents=True, exist_ok=True)
    sound = [_is_sound(name, given.seconds, given.keep) for name in names]  # one that breaks does not end the rest
    return int(not all(sound))


def _is_sound(name: str, seconds: int, keep: Path) -> bool:
    command = [sys.executable, "-m", "tests.fuzz", name, "--one", "--seconds", str(seconds), "--keep", str(keep)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=seconds + SPARE_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"BROKEN  {name}: no end {SPARE_S} s after its time", flush=True)
        return False
    lines = found.stderr.splitlines()
    runs = [line for line in lines if line.startswith("Done ")] or lines[-3:]
    print(f"{'sound' if found.returncode == 0 else 'BROKEN'}  {name}: {' '.join(runs)}", flush=True)
    return found.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
