"""A worker of a LoRA run begins when its base is here: fetched once, mended where it is damaged, bounded."""

import pytest
from msgspec.structs import replace

from atoll.node.daemon.assets.base_weights import fetch_base
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import ConfigError, DecodeError, Unreachable
from atoll.protocols.run.arena import arena_of
from tests.node.daemon.assets.test_tokenizer import BLOB, DATA, Net
from tests.node.worker.lora_home import lora_spec
from tests.node.worker.session_home import ME, OTHER

SPEC = lora_spec(BLOB)


class Asked(Net):
    """The net of the tokenizer's tests, which remembers how much it might have got."""

    async def fetch_blob(self, blob, holders, max_bytes):
        self.most = max_bytes
        await super().fetch_blob(blob, holders, max_bytes)


def bring(net, spec=SPEC):
    said: list[str] = []
    run_virtual(fetch_base(spec, net, said.append))
    return said


def test_it_comes_once_from_the_owner_first(tmp_path):
    net = Asked(tmp_path, [])
    assert bring(net) == ["fetching the base", ""]
    assert bring(net) == [], "it is here"
    assert net.asked == [[ME, OTHER]]
    size = 4 * arena_of(SPEC.model.base).values
    assert size < net.most < 1.2 * size + 8192, "a peer cannot send more than a snapshot of the whole model"


def test_a_node_says_what_it_waits_for(tmp_path):
    said = bring(Asked(tmp_path, [Unreachable("nobody")]))
    waiting = "waiting for the base: nobody reachable has it yet"
    assert said == ["fetching the base", waiting, "fetching the base", ""]


def test_a_damaged_base_is_fetched_again(tmp_path):
    net = Asked(tmp_path, [])
    bring(net)
    path = net.store.blob_path(BLOB)
    path.chmod(0o600)
    path.write_bytes(b"x" + DATA[1:])
    bring(net)
    assert len(net.asked) == 2
    assert path.read_bytes() == DATA


def test_a_base_that_is_too_large_ends_the_node_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match="the base of this run cannot be used"):
        bring(Asked(tmp_path, [DecodeError("too large")]), replace(SPEC))
