"""`python -m tests.page` (`make page-test`): the page in a real Chromium, with its bars. Exit 1 without one."""

import sys

import pytest

from tests.page.chromium import SHOTS, missing


def main() -> int:
    """Exit status 0: all of it ran and held."""
    if why := missing():
        print(f"nothing was tested: {why}", file=sys.stderr)
        return 1
    code = int(pytest.main(["-q", "-s", "-n", "0", "-m", "measure or not measure", "tests/page", *sys.argv[1:]]))
    print(f"screenshots: {SHOTS}")
    return code


if __name__ == "__main__":
    sys.exit(main())
