"""Golden bytes of feed entry v1, register v1 and manifest v1: peers of other releases read these."""

from atoll.protocols import codec
from atoll.protocols.blobs import MANIFEST_VERSION, decode_manifest, manifest_of_bytes
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, Round, RunId
from atoll.protocols.ledger.records import (
    FEED_VERSION,
    Contribution,
    Leave,
    decode_entry,
    encode_entry,
    sign_entry,
)
from atoll.protocols.ledger.registers import REGISTER_VERSION, Addresses, Lease, decode_register, sign_register

ME = Identity(bytes(range(32)))
RUN = RunId(bytes([0xAA]) * 32)


def make() -> dict[str, bytes]:
    first = sign_entry(RUN, ME, 0, b"", Leave(Round(7)))
    contribution = Contribution(Round(8), Digest(b"\1" * 32), Digest(b"\2" * 32), 15, 122880, 64, 2.5)
    lease = make_lease()
    return {
        "entry 0": encode_entry(first),
        "entry 1": encode_entry(sign_entry(RUN, ME, 1, first.id, contribution)),
        "lease": codec.encode(sign_register(RUN, ME, 3, 9, 45.0, lease)),
        "addresses": codec.encode(sign_register(RUN, ME, 3, 10, 600.0, Addresses(("/ip4/203.0.113.7/tcp/4001",)))),
        "manifest": codec.encode(manifest_of_bytes(b"x" * (1 << 20) + b"tail")),
    }


GOLDEN = {
    "entry 0": (
        "9701c420aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaad934313244334b6f6f574134"
        "586f70314a6154334d487877594d6b436570597376346950566f704d5877437a3569485964426665534200c40092a56c"
        "6561766507c440a7fa73fa4cc8ead14dd2e4ea85f699041eef622e56da61c91e720fe52d294d55bfe48cacd7809e8251"
        "a41e050ab495d7f9eb514060fc945ddb749b24dee9630c"
    ),
    "entry 1": (
        "9701c420aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaad934313244334b6f6f574134"
        "586f70314a6154334d487877594d6b436570597376346950566f704d5877437a3569485964426665534201c420fbe84f"
        "405cdbe992842391bf8f98c37e955f3aa3c176076efb809b958a85839d98ac636f6e747269627574696f6e08c4200101"
        "010101010101010101010101010101010101010101010101010101010101c42002020202020202020202020202020202"
        "020202020202020202020202020202020fce0001e00040cb4004000000000000c4409b2dc4130f72d11fb507b86df926"
        "bd94a0bc09cfbccabe8ffcc04c3bbb62a0b73027ac7d256dead30db2d6cf5cc725c669a8d759eead4e09f92dd978c8d9"
        "6906"
    ),
    "lease": (
        "9801c420aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaad934313244334b6f6f574134"
        "586f70314a6154334d487877594d6b436570597376346950566f704d5877437a356948596442666553420309cb404680"
        "000000000097a56c65617365a8747261696e696e670806c4200303030303030303030303030303030303030303030303"
        "03030303030303030306cb40934a0000000000c440f6b6f401657d7bb6b04d3a10ba6e7b5de4a73df8218e7d23a7620c"
        "7f18fe91231a2b29aea379e066b3de164c3ea8e3baf51c829e39f0ccb7da69dcdd221ab10c"
    ),
    "addresses": (
        "9801c420aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaad934313244334b6f6f574134"
        "586f70314a6154334d487877594d6b436570597376346950566f704d5877437a35694859644266655342030acb4082c0"
        "000000000092a961646472657373657391b92f6970342f3230332e302e3131332e372f7463702f34303031c440991b56"
        "8b758b761e241597a03a654732b020701657de39479fc5e17fc00b458ff2ec11a91f36bfd31efb8c2c5299dfd390ea49"
        "c019c8b0c5a6ecea126bccdb0d"
    ),
    "manifest": (
        "9301ce00100004c440ee4badf0134a6e1deca8a3e18d8d66fbcd3057d479da8bd77ba54ef3ee1c178293b2ffd7e1094d"
        "79a3432972fa624c9ec04c24a89b0821baaa43759561d1ef7d"
    ),
}


def test_the_bytes_are_those_of_version_1() -> None:
    assert (FEED_VERSION, REGISTER_VERSION, MANIFEST_VERSION) == (1, 1, 1)
    assert {name: data.hex() for name, data in make().items()} == GOLDEN


def test_the_golden_bytes_are_legal() -> None:
    data = {name: bytes.fromhex(text) for name, text in GOLDEN.items()}
    first, second = decode_entry(data["entry 0"], RUN), decode_entry(data["entry 1"], RUN)
    assert second.previous == first.id
    assert decode_register(data["lease"], RUN).value == make_lease()
    assert decode_register(data["addresses"], RUN).seq == 10
    blob = manifest_of_bytes(b"x" * (1 << 20) + b"tail").id
    assert decode_manifest(data["manifest"], blob).chunks == 2


def make_lease() -> Lease:
    return Lease("training", Round(8), Round(6), b"\3" * 32, 6, 1234.5)
