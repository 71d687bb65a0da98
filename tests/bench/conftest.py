"""The command line as the tests of `cli` call it."""

from tests.cli.conftest import atoll

__all__ = ["atoll"]
