"""A blob on the disk that is not what it should be: who is to blame for it."""

import pytest

from atoll.node.daemon.assets.fetching import verify_whole
from atoll.p2p.blobs.store import BlobStore
from atoll.protocols.errors import CorruptFault, DecodeError


class Shelf:
    def __init__(self, folder):
        self.store = BlobStore(folder)
        self.has_blob, self.delete_blob = self.store.has, self.store.delete

    async def is_whole(self, blob):
        return self.store.is_whole(blob)


async def refuse():
    raise DecodeError("payload: a scale above 1")


async def test_what_the_disk_damaged_is_its_author_s_fault_no_more(tmp_path):
    """The author would be blamed, and its work void here for ever, for a bit that this disk lost."""
    shelf = Shelf(tmp_path)
    sent, damaged = (shelf.store.add_bytes(data * 100) for data in (b"void", b"sound"))
    path = shelf.store.path(damaged)
    path.chmod(0o600)
    path.write_bytes(b"dirty" * 100)
    with pytest.raises(DecodeError, match="a scale above 1"):
        await verify_whole(shelf, sent, refuse)
    with pytest.raises(CorruptFault, match="damaged on the disk: payload: a scale above 1"):
        await verify_whole(shelf, damaged, refuse)
    assert (shelf.has_blob(sent), shelf.has_blob(damaged)) == (True, False), "it is fetched again"
