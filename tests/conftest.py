"""The fast tests first: what starts whole swarms comes last."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("swarm") is not None)
