"""Packing: every piece of text is in one shard once, or held out; nothing is left behind where it fails."""

import json
from collections import Counter

import numpy as np
import pytest

from atoll.node.learning.data import pack as packing
from atoll.node.learning.data.hub import hub_documents
from atoll.node.learning.data.pack import PIECE_BYTES, HeldOut, PackOptions, TextPart, pack, pieces, shares_of
from atoll.node.learning.data.packed import PackedText
from atoll.node.runs.packs import add_pack, is_pack, read_pack
from atoll.p2p.blobs.store import BlobStore
from atoll.protocols.data.file_source import FileSource, RowFilter
from atoll.protocols.data.shard_index import HELD_OUT_FILE, TOKENIZER_FILE, shard_file
from atoll.protocols.errors import ConfigError, DiskFault

BYTES = PackOptions("bytes", 4096, 0.1, 1)


def texts(count, name="text", words=40):
    return [f"{name} {at}: " + " ".join(f"w{at * word % 97}" for word in range(words)) for at in range(count)]


def part(documents, name="text", weight=1.0):
    return TextPart(name, lambda: iter([document.encode() for document in documents]), weight)


def packed(parts, to, options=BYTES):
    return pack(parts, to, options, lambda *_: None)


def trained_text(folder, found):
    kind = f"<u{found.packed.token_bytes}"
    shards = [np.fromfile(folder / shard_file(at), kind) for at in range(found.packed.count)]
    assert {len(shard) for shard in shards} == {found.packed.shard_tokens}
    return bytes(np.concatenate(shards).astype(np.uint8))


def test_every_document_is_in_one_shard_once_or_held_out(tmp_path):
    documents = texts(400)
    found = packed([part(documents)], tmp_path / "to")
    held_out = HeldOut(0.1, np.dtype("<u1"))
    train = [text for text in documents if not held_out.takes(text.encode() + b"\n\n")]
    assert 0.05 < 1 - len(train) / len(documents) < 0.15
    whole = trained_text(tmp_path / "to", found)
    seen = Counter(each for each in whole.decode().split("\n\n") if each in set(documents))
    assert set(seen.values()) == {1}
    assert len(seen) >= len(train) - 1, "fewer tokens than there are shards are left out at the end"
    assert not set(seen) - set(train)
    assert len(whole) + found.packed.count > sum(len(text) + 2 for text in train)
    val = (tmp_path / "to" / HELD_OUT_FILE).read_bytes()[: found.packed.held_out_tokens].decode()
    assert Counter(val.split("\n\n")[:-1]) == Counter(set(documents) - set(train))
    order = [whole.index(text.encode()) for text in train[:-1] if text.encode() in whole]
    assert order != sorted(order), "documents are shuffled"


def test_the_same_text_and_seed_give_the_same_shards(tmp_path):
    names = [packed([part(texts(300))], tmp_path / str(at), BYTES._replace(seed=at // 2)).name for at in range(3)]
    assert names[0] == names[1] != names[2]


def test_a_copy_of_a_document_is_on_the_same_side(tmp_path):
    documents = texts(200)
    found = packed([part(documents * 3)], tmp_path / "to")
    train = trained_text(tmp_path / "to", found).decode()
    val = (tmp_path / "to" / HELD_OUT_FILE).read_bytes()[: found.packed.held_out_tokens].decode()
    both = [text for text in documents if text in train and text in val]
    assert both == []
    assert val.count("text ") == 3 * len({text for text in documents if text in val})


def test_texts_are_mixed_by_their_weights_and_none_comes_twice(tmp_path):
    parts = [part(texts(600, "aaa"), "a", 1.0), part(texts(300, "bbb"), "b", 3.0)]
    found = packed(parts, tmp_path / "to")
    whole = trained_text(tmp_path / "to", found).decode()
    counts = [whole.count("aaa "), whole.count("bbb ")]
    assert found.shares[1] == 1.0
    assert counts[1] / counts[0] == pytest.approx(3, rel=0.25)
    assert max(Counter(each for each in whole.split("\n\n") if each.startswith(("aaa", "bbb"))).values()) == 1
    assert shares_of([100, 100], [1, 3]) == [pytest.approx(1 / 3), 1.0]
    assert shares_of([100, 1000], [1, 1]) == [1.0, pytest.approx(0.1)]


def test_a_trained_tokenizer_travels_with_the_shards(tmp_path):
    found = packed([part(texts(400))], tmp_path / "to", BYTES._replace(tokenizer="bpe8k"))
    assert (tmp_path / "to" / TOKENIZER_FILE).read_bytes() == found.tokenizer.data
    assert (found.tokenizer.name, found.packed.vocab, found.packed.token_bytes) == ("file", 768, 2)
    again = packed(
        [part(texts(400))], tmp_path / "again", BYTES._replace(tokenizer=str(tmp_path / "to" / TOKENIZER_FILE))
    )
    assert again.packed == found.packed


def test_validation_bytes_are_those_of_the_text(tmp_path):
    documents = [f"één {at} 東京 " * 30 for at in range(300)]
    for tokenizer in ("bytes", "bpe8k"):
        to, store = tmp_path / tokenizer, BlobStore(tmp_path / f"{tokenizer}-blobs")
        found = packed([part(documents)], to, BYTES._replace(tokenizer=tokenizer))
        add_pack(to, found.name, store.add_file)
        text = PackedText(found.packed, tmp_path / f"{tokenizer}-blobs", 16)
        count = (found.packed.held_out_tokens - 1) // 16
        first, last = text._val_bytes_N[0], text._val_bytes_N[count * 16 + 1 :].sum()
        held_out = HeldOut(0.1, np.dtype("<u1"))
        whole = sum(len(each.encode()) + 2 for each in documents if held_out.takes(each.encode() + b"\n\n"))
        assert text.validation_bytes(1 << 20) == whole - first - last


def test_long_documents_are_cut_between_words_and_characters():
    text = ("é" * 40 + " ") * 4000
    found = list(pieces(text.encode()))
    assert len(found) > 1
    assert b"".join(found).decode() == text
    assert all(len(each) <= PIECE_BYTES and each.decode() for each in found)
    solid = ("é" * PIECE_BYTES).encode()
    assert b"".join(pieces(solid)) == solid
    assert all(each.decode() for each in pieces(b"x" + solid))
    assert list(pieces(b"short")) == [b"short"]


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], BYTES, "no text to train on"),
        (["short"] * 3, BYTES, "tokens to train on|no text|held out"),
        (texts(400), BYTES._replace(holdout=1e-12), "nothing is held out"),
        (texts(400), BYTES._replace(tokenizer="missing.json"), "no tokenizer at"),
    ],
)
def test_what_cannot_be_packed_leaves_nothing(documents, options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        packed([part(documents)], tmp_path / "to", options)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_leaves_nothing(tmp_path, monkeypatch):
    def full(path, tokens_N):
        raise DiskFault("no space left on device")

    monkeypatch.setattr(packing, "_write_shard", full)
    with pytest.raises(DiskFault):
        packed([part(texts(400))], tmp_path / "to")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "to").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        packed([part(texts(400))], tmp_path / "to")


def test_a_folder_is_known_as_a_packed_text(tmp_path):
    found = packed([part(texts(400))], tmp_path / "to")
    assert is_pack(tmp_path / "to")
    assert not is_pack(tmp_path)
    assert read_pack(tmp_path / "to") == (found.packed, found.name)
    with pytest.raises(ConfigError, match="no packed text"):
        read_pack(tmp_path)
    (tmp_path / "to" / "packed.index").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pack(tmp_path / "to")


def test_a_data_set_folder_is_streamed(tmp_path):
    pytest.importorskip("datasets", reason="NOT TESTED: the library datasets is missing")
    rows = [{"body": text, "lang": "en" if at % 2 else "nl"} for at, text in enumerate(texts(20))]
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = FileSource("", "body", (RowFilter("lang", "en"),))
    assert [each.decode() for each in hub_documents(f"hf:{folder}", source)] == texts(20)[1::2]
    with pytest.raises(ConfigError, match="no column 'text'"):
        list(hub_documents(f"hf:{folder}", FileSource("")))
    for name in (f"hf:{tmp_path / 'missing'}", f"hf:{folder}?split=other", f"hf:{folder}?what=1", "hf:"):
        with pytest.raises(ConfigError) as caught:
            list(hub_documents(name, source))
        assert "\n" not in caught.value.line()
