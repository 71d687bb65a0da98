"""Names that nodes announce: what is legal, in every version of Python, and what a hostile one could do."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocols.ledger.peer_names import MAX_PEER_NAME, composed, name_fault


@pytest.mark.parametrize(
    "name",
    [
        "", "otter", "Zoë 2", "<b>&amp;'\"", "[red]x[/]", "北京", "한국", "นี่", "क्षि", "Ωμέγα", "∑ x₂ ☃", "x" * 32,
        "雪" * 32,
    ],
)  # fmt: skip
def test_what_people_write_is_legal(name):
    assert name_fault(name) == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x" * 33, "33 characters; at most 32"),
        (" otter", "blank"), ("otter ", "blank"), ("  ", "blank"),
        ("a\nb", "U+000A"), ("a\tb", "U+0009"), ("a\0", "U+0000"), ("\x1b[2J", "U+001B"), ("a\x9b2J", "U+009B"),
        ("\u202eretto", "U+202E"), ("\u2066x\u2069", "U+2066"), ("a\u200db", "U+200D"), ("a\u00adb", "U+00AD"),
        ("a\u061cb", "U+061C"), ("a\ufeffb", "U+FEFF"),
        ("a\u2028b", "U+2028"), ("a\u2003b", "U+2003"), ("a\u00a0b", "U+00A0"), ("a\u200bb", "U+200B"),
        ("שלום", "U+05E9"), ("سلام", "U+0633"), ("x ٣", "U+0663"),
        ("a\u3164b", "U+3164"), ("a\u2800b", "U+2800"), ("a\ufe0fb", "U+FE0F"), ("a\u034fb", "U+034F"),
        ("\ud800", "U+D800"), ("\ue000", "U+E000"), ("\U0001f600", "U+1F600"), ("\u0378", "U+0378"),
        ("e\u0301", "normal form C"), ("\u212b", "normal form C"),
        ("\u0323a", "mark without a letter"), ("x\u0323\u0324\u0325", "more than 2 over one"),
        ("x \u0323\u0324\u0325", "more than 2 over one"),
    ],
)  # fmt: skip
def test_what_would_reach_beyond_its_place_is_refused(name, said):
    assert said in name_fault(name)


def test_a_name_that_is_typed_in_parts_is_composed():
    assert name_fault(composed("Zoe\u0308")) == ""
    assert composed("Zoe\u0308") == "Zoë"


@given(st.text(max_size=MAX_PEER_NAME + 2))
def test_a_legal_name_is_so_by_newer_tables_too(name):
    """By Unicode 3.2, and so in every version of Python. What it has, no later version makes invisible."""
    if name_fault(name) == "":
        assert name.isprintable()
        assert unicodedata.normalize("NFC", name) == name
        assert len(name) <= MAX_PEER_NAME
        assert len(name.encode()) <= 4 * MAX_PEER_NAME


def test_no_letter_depends_on_the_tables_of_this_python():
    """Of all letters: a legal one has a place from left to right in newer tables, is printable and composed."""
    legal = [
        chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and name_fault(f"x{chr(code)}x") == ""
    ]
    assert len(legal) > 80_000
    assert all(letter.isprintable() for letter in legal)
    assert not [letter for letter in legal if unicodedata.bidirectional(letter) in ("R", "AL", "AN", "BN")]
    assert not [letter for letter in legal if unicodedata.category(letter)[0] in "CZ" and letter != " "]
