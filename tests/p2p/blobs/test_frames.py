"""Golden bytes of blob wire v2: peers of other releases read these."""

from typing import Any

import pytest

from atoll.p2p.blobs.frames import (
    ASK_MAX_BYTES,
    PROTOCOL,
    WINDOW,
    Ask,
    BlobOffer,
    BlobRefusal,
    Cancel,
    Chunk,
    Have,
    Want,
)
from atoll.protocols import codec
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Digest

GOLDEN: dict[str, tuple[Any, str]] = {
    "ask": (Ask(Digest(b"\1" * 32), 1), "93a361736bc420" + "01" * 32 + "01"),
    "want": (Want(300), "92a477616e74cd012c"),
    "cancel": (Cancel(7), "92a663616e63656c07"),
    "offer, whole": (
        BlobOffer(codec.encode(manifest_of_bytes(b"tail")), b""),
        "93a56f66666572c425930104c42093b2ffd7e1094d79a3432972fa624c9ec04c24a89b0821baaa43759561d1ef7dc400",
    ),
    "offer, a part": (BlobOffer(b"m", b"\x05"), "93a56f66666572c4016dc40105"),
    "refusal": (BlobRefusal("not here"), "92a77265667573616ca86e6f742068657265"),
    "have": (Have(b"\xff\x01"), "92a468617665c402ff01"),
    "chunk": (Chunk(70000), "92a56368756e6bce00011170"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_are_those_of_version_2(name: str) -> None:
    value, text = GOLDEN[name]
    assert codec.encode(value).hex() == text
    assert codec.decode(bytes.fromhex(text), type(value)) == value


def test_the_name_of_the_wire() -> None:
    assert PROTOCOL == "/atoll/blob/2"


@pytest.mark.parametrize(
    "wrong",
    [["ask", b"\1" * 31, 0], ["ask", b"\1" * 32, WINDOW + 1], ["ask", b"\1" * 32], ["ask", b"\1" * 32, -1]],
)
def test_what_is_not_a_question(wrong: list[object]) -> None:
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(wrong), Ask)


def test_a_bitmap_is_capped() -> None:
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(["have", bytes((1 << 14) + 1)]), Have)


def test_questions_fit_their_cap() -> None:
    for value in (Ask(Digest(b"\xff" * 32), WINDOW), Want((1 << 32) - 1), Cancel((1 << 32) - 1)):
        assert len(codec.encode(value)) <= ASK_MAX_BYTES
