"""The name that a node may announce in its lease: what is legal, by tables that no later Unicode changes.

Python's own tables grow with its version: a letter that is new in one would be a fault of its sender in another.
`unicodedata.ucd_3_2_0` is the same in all of them.
"""

from typing import Annotated, TypeAlias
from unicodedata import ucd_3_2_0 as unicode

from msgspec import Meta

MAX_PEER_NAME = 32
"""Most characters of a name; at most 128 bytes of UTF-8."""
MAX_MARKS = 2
"""Most marks over one letter: enough for Thai, too few to cover the lines around it."""
PeerName: TypeAlias = Annotated[str, Meta(max_length=MAX_PEER_NAME)]
"""Empty: none. A name is no identity: several members may announce the same one."""
_REFUSED = frozenset(("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"))
"""Control and format characters, surrogates, what 3.2 does not have, and all blanks but the plain one."""
_RIGHT_TO_LEFT = frozenset(("R", "AL", "AN"))
"""They reorder what stands beside them on a terminal, and so the PeerID."""
_MARKS = frozenset(("Mn", "Me"))
_UNSEEN = frozenset(
    map(chr, (0xAD, 0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0, *range(0x180B, 0x180E)))
) | frozenset(map(chr, range(0xFE00, 0xFE10)))
"""Letters, marks and symbols that nothing is drawn for."""


def composed(name: str) -> str:
    """The same name in Unicode's normal form C, which alone is legal."""
    return unicode.normalize("NFC", name)


def name_fault(name: str) -> str:
    """Why a name is illegal; empty if it is legal, as no name is."""
    if len(name) > MAX_PEER_NAME:
        return f"it has {len(name)} characters; at most {MAX_PEER_NAME} are legal"
    if name != name.strip(" "):
        return "it begins or ends with a blank"
    for letter in name:
        if letter != " " and not _is_legal(letter):
            return f"U+{ord(letter):04X} is not legal: letters (from left to right), digits, signs and blanks are"
    if composed(name) != name:
        return "it is not in Unicode's normal form C"
    in_a_row = MAX_MARKS  # a mark needs a letter before it
    for letter in name:
        in_a_row = in_a_row + 1 if unicode.category(letter) in _MARKS else 0
        if in_a_row > MAX_MARKS:
            return f"it has a mark without a letter, or more than {MAX_MARKS} over one"
    return ""


def _is_legal(letter: str) -> bool:
    is_turned = unicode.bidirectional(letter) in _RIGHT_TO_LEFT
    return unicode.category(letter) not in _REFUSED and letter not in _UNSEEN and not is_turned
