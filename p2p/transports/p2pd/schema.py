"""The p2pd executable inside the hivemind package, and the messages of p2pd's control socket.

hivemind itself is never imported: its package pulls in torch. Its generated messages are loaded by file
location into a descriptor pool of their own, because hivemind and py-libp2p both claim `crypto.pb` in
protobuf's default pool and the second import would fail.
"""

import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pool, message_factory

from atoll.protocols.errors import LocalFault

_MODULE = "atoll_p2pd_pb2"
_PACKAGE = "p2pclient.p2pd.pb"
_MESSAGES = (
    "Request",
    "Response",
    "StreamInfo",
    "ConnectRequest",
    "DisconnectRequest",
    "StreamOpenRequest",
    "StreamHandlerRequest",
)


def binary() -> Path:
    """Return the p2pd executable of the installed hivemind. Raises LocalFault when there is none."""
    path = _hivemind_folder() / "hivemind_cli" / "p2pd"
    if not path.is_file():
        raise LocalFault(f"hivemind has no p2pd at {path}", hint="reinstall the hivemind wheel for this platform")
    return path


@lru_cache(maxsize=1)
def messages() -> Any:
    """Return the classes of the control messages by name. Raises LocalFault when hivemind is not installed."""
    pool = _private_pool(_hivemind_folder() / "proto" / "p2pd_pb2.py")
    classes = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }
    return SimpleNamespace(**classes)


def _hivemind_folder() -> Path:
    spec = importlib.util.find_spec("hivemind")  # a top-level name: found, not imported
    if spec is None or not spec.submodule_search_locations:
        raise LocalFault("hivemind is not installed", hint="pip install 'hivemind>=1.1.12,<1.2'")
    return Path(spec.submodule_search_locations[0])


def _private_pool(generated: Path) -> descriptor_pool.DescriptorPool:
    """Run generated code with a fresh default pool, and return that pool."""
    spec = importlib.util.spec_from_file_location(_MODULE, generated)
    if spec is None or spec.loader is None or not generated.is_file():
        raise LocalFault(f"hivemind has no {generated}", hint="reinstall hivemind")
    pool: descriptor_pool.DescriptorPool = descriptor_pool.DescriptorPool()
    default = descriptor_pool.Default
    descriptor_pool.Default = lambda: pool
    try:
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MODULE] = module
        spec.loader.exec_module(module)
    finally:
        descriptor_pool.Default = default
    return pool
