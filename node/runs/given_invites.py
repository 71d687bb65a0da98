"""The invites that this home gave out, one file each: a short link leads to them until they expire or are revoked.

HOME/runs/<run id>/invites/<invite id>: when it was made, Unix seconds, a blank, and the long link. The name of a
revoked one ends in `.revoked`.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from atoll.node.config.home import Home
from atoll.node.runs.invites import invite_text
from atoll.p2p.system.atomic_files import disk, make_folder, read_whole, sync_folder, write_whole
from atoll.protocols.errors import ConfigError, CorruptFault, DecodeError, LocalFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId
from atoll.protocols.run.invite import LINK_MAX_CHARACTERS, Invite, invite_id, read_invite, shorten
from atoll.protocols.run.run_spec import RunSpec

REVOKED = ".revoked"
FORGOTTEN_S = 30 * 86400
"""An invite is removed from the list so many seconds after its expiry."""
REUSED_SHARE = 0.9
"""A node shows the same invite again while this share of its time is left."""
LOOKED_FOR_S = 3600
log = logging.getLogger(__name__)
_FOLDER = "invites"
_FILE_MAX_BYTES = LINK_MAX_CHARACTERS + 32


class GivenInvite(NamedTuple):
    """An invite that this home gave out."""

    path: Path
    link: str
    invite: Invite
    made: int
    """Unix seconds."""

    @property
    def id(self) -> str:
        """Its id in hexadecimal."""
        return self.path.name.removesuffix(REVOKED)

    @property
    def is_revoked(self) -> bool:
        """Whether the user revoked it."""
        return self.path.name.endswith(REVOKED)


def store_given(home: Home, link: str, unix_s: float) -> str:
    """Remember an invite that is given out; return its short link, or itself if it has none. Raises DiskFault."""
    invite = read_invite(link)
    for old in given_invites(home):
        if old.invite.expires + FORGOTTEN_S < unix_s:
            with disk(old.path):
                old.path.unlink(missing_ok=True)
    folder = make_folder(home.run(invite.run) / _FOLDER)
    write_whole(folder / invite_id(invite).hex(), f"{int(unix_s)} {link}".encode())
    return shorten(link) or link


class ShownInvite:
    """The link that a node shows to its user, again and again.

    It is made anew when the addresses change, and looked for anew each hour. An invite that was given out on the
    same terms a short while ago serves again, so restarts do not fill the list.
    """

    def __init__(self, home: Home, spec: RunSpec, me: Identity) -> None:
        self._home = home
        self._spec = spec
        self._me = me
        self._last: tuple[tuple[list[str], int], str] | None = None

    def link(self, seeds: list[str], unix_s: float) -> str:
        """A link through `seeds`: short where it names an address of this node, and the disk can store it."""
        key = (seeds, int(unix_s // LOOKED_FOR_S))
        if self._last is None or self._last[0] != key:
            link = invite_text(self._spec, self._me, seeds, unix_s)
            try:
                link = _given_again(self._home, link, unix_s)
            except LocalFault as error:
                log.warning("no short invite: %s", error.line())
            self._last = key, link
        return self._last[1]


def given_invites(home: Home) -> list[GivenInvite]:
    """All that this home gave out and has not forgotten, the oldest first. Raises DiskFault, CorruptFault."""
    return sorted(_all(home), key=lambda given: (given.made, given.id))


def find_given(home: Home, run: RunId, wanted: bytes, unix_s: float) -> str:
    """The long link with this id; empty if there is none, if it has expired or was revoked."""
    path = home.run(run) / _FOLDER / wanted.hex()
    given = _read(path)
    return given.link if given is not None and unix_s < given.invite.expires else ""


def revoke_given(home: Home, wanted: str) -> GivenInvite:
    """Revoke the invite whose id begins with `wanted`. Raises ConfigError unless it is exactly one."""
    found = [given for given in given_invites(home) if wanted and given.id.startswith(wanted.lower())]
    if len(found) != 1:
        many = f"{len(found)} invites of this home begin" if found else "no invite of this home begins"
        raise ConfigError(f"{many} with {wanted!r}", hint="see `atoll invite list`")
    (given,) = found
    if given.is_revoked:
        return given
    path = given.path.with_name(given.path.name + REVOKED)
    with disk(path):
        given.path.rename(path)
    sync_folder(path.parent)
    return given._replace(path=path)


def _given_again(home: Home, link: str, unix_s: float) -> str:
    new = read_invite(link)
    for old in given_invites(home):
        is_fresh = old.invite.expires - unix_s > REUSED_SHARE * (new.expires - unix_s)
        if not old.is_revoked and is_fresh and _terms(old.invite) == _terms(new):
            return shorten(old.link) or old.link
    return store_given(home, link, unix_s)


def _all(home: Home) -> Iterator[GivenInvite]:
    with disk(home.runs):
        paths = [path for path in home.runs.glob(f"*/{_FOLDER}/*") if path.suffix in ("", REVOKED)]
    yield from filter(None, map(_read, paths))


def _read(path: Path) -> GivenInvite | None:
    data = read_whole(path, max_bytes=_FILE_MAX_BYTES)
    if data is None:
        return None
    made, _, link = data.decode("ascii", "replace").partition(" ")
    try:
        return GivenInvite(path, link, read_invite(link), int(made))
    except (DecodeError, ValueError) as error:
        raise CorruptFault(f"{path}: not an invite", hint="remove the file") from error


def _terms(invite: Invite) -> tuple[object, ...]:
    tokens = tuple((token.name, token.members) for token in invite.token)
    return invite.run, invite.key, invite.seeds, bool(invite.run_file), tokens
