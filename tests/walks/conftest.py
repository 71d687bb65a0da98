from tests.e2e.conftest import nodes, until

__all__ = ["nodes", "until"]
