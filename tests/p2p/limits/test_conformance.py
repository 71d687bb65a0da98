"""A host under limits obeys every rule of a host: the transports' conformance tests, run once more."""

import importlib.util
from pathlib import Path

_path = Path(__file__).parent.parent / "transports" / "test_host_conformance.py"
_spec = importlib.util.spec_from_file_location("limits_host_conformance", _path)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_tests = {name: test for name, test in vars(_module).items() if name.startswith("test_")}
globals().update(_tests)


def test_there_are_rules() -> None:
    assert len(_tests) > 10
