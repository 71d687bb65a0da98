"""Text as people have it: every format gives the same bytes, and what cannot be read gets one line and a hint."""

import gzip
import json
import sys

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.learning.data import documents
from atoll.node.learning.data.documents import files_at, read_documents
from atoll.protocols.data.file_source import FileSource, RowFilter, parse_file_source
from atoll.protocols.errors import ConfigError

DOCUMENTS = ["één text\nof two lines", "a second one", "", "third, with \u2028 and \U0001f600"]
WHOLE = "\n\n".join(DOCUMENTS).encode()
ANY = FileSource("any")


def rows(column="text"):
    return [{"id": at, column: text, "lang": "en" if at % 2 else "nl"} for at, text in enumerate(DOCUMENTS)]


def write(path, found):
    """The rows in the format of the path's name."""
    table = pyarrow.Table.from_pylist(found)
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(table, path, row_group_size=3)
    elif name.endswith(".stream.arrow"):
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    elif name.endswith((".arrow", ".feather")):
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        data = "\n".join(json.dumps(row) for row in found).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


FORMATS = ["a.jsonl", "a.jsonl.gz", "a.ndjson", "a.parquet", "a.arrow", "a.stream.arrow", "a.feather"]


@pytest.mark.parametrize("name", FORMATS)
def test_all_formats_of_rows_give_the_same_bytes(name, tmp_path):
    path = write(tmp_path / name, rows())
    assert read_documents(str(path), ANY) == WHOLE
    other = write(tmp_path / f"other-{name}", rows("body"))
    assert read_documents(str(other), FileSource("any", "body")) == WHOLE


@pytest.mark.parametrize("name", FORMATS)
def test_filters_choose_rows(name, tmp_path):
    path = write(tmp_path / name, rows())
    for filters, chosen in [
        ([("lang", "nl")], DOCUMENTS[::2]),
        ([("lang", "en"), ("id", "3")], DOCUMENTS[3:]),
        ([("lang", "fr")], []),
    ]:
        source = FileSource("any", filters=tuple(RowFilter(*each) for each in filters))
        assert read_documents(str(path), source) == "\n\n".join(chosen).encode()


@pytest.mark.parametrize("name", FORMATS)
def test_a_column_that_is_not_there_is_named(name, tmp_path):
    path = write(tmp_path / name, rows("body"))
    with pytest.raises(ConfigError, match="text") as caught:
        read_documents(str(path), ANY)
    assert "--column" in (caught.value.hint or "")
    assert "\n" not in caught.value.line()


def test_rows_without_a_text_are_passed_over_in_tables(tmp_path):
    path = write(tmp_path / "a.parquet", [{"text": "one"}, {"text": None}, {"text": "two"}])
    assert read_documents(str(path), ANY) == b"one\n\ntwo"


def test_truth_values_and_numbers_are_written_as_json_writes_them(tmp_path):
    found = [{"text": f"{at}", "good": at == 1, "score": at / 2} for at in range(3)]
    for name in ("a.parquet", "a.jsonl"):
        path = write(tmp_path / name, found)
        assert read_documents(str(path), FileSource("x", filters=(RowFilter("good", "true"),))) == b"1"
        assert read_documents(str(path), FileSource("x", filters=(RowFilter("score", "0.5"),))) == b"1"


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("two")
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"four"))
    write(tmp_path / "b" / "3.jsonl", [{"text": "three"}])
    for odd in (".hidden.txt", "picture.png", "state.json"):
        (tmp_path / odd).write_text("never read")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "notes.txt").write_text("never read")
    assert read_documents(str(tmp_path), ANY) == b"one\n\ntwo\n\nthree\n\nfour"
    assert read_documents(str(tmp_path / "b"), ANY) == b"two\n\nthree"


def test_a_pattern_is_read_in_the_order_of_its_names(tmp_path):
    for at in (10, 9, 1):
        (tmp_path / f"{at}.txt").write_text(str(at))
    (tmp_path / "odd[1].txt").write_text("a name and no pattern")
    assert read_documents(str(tmp_path / "?.txt"), ANY) == b"1\n\n9"
    assert read_documents(str(tmp_path / "**" / "1*.txt"), ANY) == b"1\n\n10"
    assert read_documents(str(tmp_path / "odd[1].txt"), ANY) == b"a name and no pattern"


def test_a_dataset_that_the_library_datasets_saved(tmp_path):
    """Its folder has streams named like this, and JSON files about them."""
    folder = tmp_path / "train"
    folder.mkdir()
    for at in range(2):
        write(folder / f"data-0000{at}-of-00002.stream.arrow", rows()[at * 2 : at * 2 + 2])
    for name in ("state.json", "dataset_info.json"):
        (folder / name).write_text("{}")
    assert read_documents(str(folder), ANY) == WHOLE


# --- what cannot be read -------------------------------------------------------------------------

PARQUET_TAIL = b"\x00" * 20 + b"PAR1"
BROKEN = [
    ("none.txt", None, "no data file"),
    ("none.parquet", None, "no data file"),
    ("none.arrow", None, "no data file"),
    ("picture.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "zero byte"),
    ("latin1.txt", "un été à la mer".encode("latin-1"), "UTF-8"),
    ("cut.txt", "één".encode()[:-2], "UTF-8"),
    ("bad.jsonl", b'{"text":"a"}\n{"tekst":"b"}\n', "line 2"),
    ("broken.jsonl", b'{"text":"a"', "line 1"),
    ("number.jsonl", b'{"text":1}', "line 1"),
    ("bytes.jsonl", b'{"text":"\xff"}', "line 1"),
    ("list.jsonl", b"[1]", "line 1"),
    ("a.parquet", b"PAR1" + PARQUET_TAIL, "cannot read"),
    ("text.parquet", b"hello", "cannot read"),
    ("a.arrow", b"ARROW1\0\0" + b"\0" * 30, "cannot read"),
    ("empty.arrow", b"", "cannot read"),
    ("a.txt.gz", b"no archive", "unpacked"),
    ("cut.jsonl.gz", gzip.compress(b'{"text":"a"}' * 99, mtime=0)[:-9], "unpacked"),
]


@pytest.mark.parametrize(("name", "content", "said"), BROKEN)
def test_what_cannot_be_read_gets_one_line_and_a_hint(name, content, said, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_documents(str(path), ANY)
    assert caught.value.hint
    assert "\n" not in caught.value.line()


def test_a_column_of_numbers_is_no_text(tmp_path):
    path = write(tmp_path / "a.parquet", rows())
    with pytest.raises(ConfigError, match="holds int64, no text"):
        read_documents(str(path), FileSource("any", "id"))


def test_arrow_whose_places_are_impossible_is_refused(tmp_path):
    path = write(tmp_path / "a.arrow", [{"text": "x" * 40}] * 4)
    data = bytearray(path.read_bytes())
    at = data.index((40).to_bytes(4, "little") + (80).to_bytes(4, "little"))
    data[at : at + 4] = (90).to_bytes(4, "little")  # the next one begins at 80: its length is below 0
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="cannot read"):
        read_documents(str(path), ANY)


def test_plain_text_has_no_columns(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match="no columns"):
        read_documents(str(tmp_path / "a.txt"), FileSource("any", "body"))


def test_a_folder_or_a_pattern_of_nothing(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    for path in (tmp_path, tmp_path / "*.txt"):
        with pytest.raises(ConfigError, match=r"no text|no file") as caught:
            files_at(str(path))
        assert caught.value.hint


def test_sizes_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_BYTES", 100)
    (tmp_path / "a.txt").write_text("x" * 60)
    assert len(read_documents(str(tmp_path), ANY)) == 60
    (tmp_path / "b.txt").write_text("x" * 60)
    with pytest.raises(ConfigError, match="text of"):
        read_documents(str(tmp_path), ANY)
    (tmp_path / "b.txt").write_text("x" * 101)
    with pytest.raises(ConfigError, match="data file"):
        read_documents(str(tmp_path), ANY)
    (tmp_path / "b.txt").unlink()
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"x" * 10_000))
    with pytest.raises(ConfigError, match="unpacks to more"):
        read_documents(str(tmp_path), ANY)
    monkeypatch.setattr(documents, "MAX_FILES", 1)
    with pytest.raises(ConfigError, match="more than 1 files"):
        read_documents(str(tmp_path), ANY)


def test_a_character_may_lie_on_the_border_of_two_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_LOOK_BYTES", 7)
    (tmp_path / "a.txt").write_text("één \U0001f600\U0001f600 x" * 20)
    assert read_documents(str(tmp_path), ANY).decode() == "één \U0001f600\U0001f600 x" * 20


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", rows())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "atoll.node.learning.data.tables", raising=False)
    with pytest.raises(ConfigError, match="pyarrow") as caught:
        read_documents(str(path), ANY)
    assert "atoll[data]" in (caught.value.hint or "")


# --- what a run says -----------------------------------------------------------------------------

NAMES = (
    st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=20).map(str.strip).filter(bool)
)


@given(NAMES, NAMES, st.lists(st.tuples(NAMES.filter(lambda name: "=" not in name), NAMES), max_size=4))
def test_a_source_is_read_as_it_was_written(name, column, said):
    filters = {each: value for each, value in said if each != column}
    source = FileSource(name, column, tuple(RowFilter(*each) for each in filters.items()))
    assert parse_file_source(str(source)) == source


def test_names_of_earlier_runs_mean_what_they_did():
    for name in ("a.txt", "my text (1).jsonl", "/home/me/100%.txt", "één.txt"):
        assert parse_file_source(f"file:{name}") == FileSource(name)
    assert str(FileSource("a.txt")) == "file:a.txt"
    assert str(FileSource("?.txt", "body")) == "file:%3F.txt?column=body"
