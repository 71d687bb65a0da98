"""The file of the control socket: private from its first moment, and gone once the node has ended well."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.node.config.home import socket_address
from atoll.protocols.errors import LocalFault


@dataclass(frozen=True, slots=True)
class ControlSocket:
    """A Unix socket at this path."""

    path: Path

    def bind(self, connections: int) -> socket.socket:
        """A listening socket that only its owner may connect to, from its first moment. Raises LocalFault."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            self.path.unlink(missing_ok=True)
            with socket_address(self.path) as address:
                listener.bind(address)
            listener.listen(connections)
        except OSError as error:
            listener.close()
            raise LocalFault(
                f"cannot open the control socket {self.path}: {error.strerror}", hint="choose another --home"
            ) from error
        finally:
            os.umask(mask)
        listener.setblocking(False)
        return listener

    def put_aside(self) -> None:
        """Nobody connects any more. Idempotent."""
        with suppress(OSError):  # a disk that became read-only keeps the file
            self.path.rename(self._ended)

    def remove(self, is_end_lost: bool) -> None:
        """Remove what was put aside. If the disk refused the line that says how the node ended, put it back.

        Then it is as after a kill, so `stop --wait` is no success. A rename needs no room and no new inode.
        """
        with suppress(OSError):
            if not is_end_lost:
                self._ended.unlink(missing_ok=True)
            elif self._ended.exists():
                self._ended.rename(self.path)
            else:
                self.path.touch()

    @property
    def _ended(self) -> Path:
        return self.path.with_suffix(".ended")
