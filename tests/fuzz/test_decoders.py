"""No bytes make a decoder do anything but refuse them or say what they are."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.mutation import mutated
from tests.fuzz.targets import check, targets

CORPUS = Path(__file__).with_name("corpus")
INPUTS_EACH, INPUTS_A_SEED = 2000, 50


@pytest.mark.parametrize("name", targets())
def test_a_decoder_refuses_or_says_what_it_is(name):
    target = targets()[name]
    assert all(check(target, example) for example in target.examples), "examples are legal"

    @settings(max_examples=INPUTS_EACH // INPUTS_A_SEED, deadline=None, database=None)
    @given(st.integers(0, 2**64 - 1))
    def law(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(INPUTS_A_SEED):
            check(target, mutated(rng, target.examples))

    law()


@pytest.mark.parametrize("folder", sorted(path.name for path in CORPUS.iterdir()))
def test_each_file_of_a_folder_of_the_corpus_has_its_verdict(folder):
    """The folder is named after a target; `NAME.bad` must be refused, `NAME.ok` taken."""
    target = next(target for name, target in targets().items() if folder_of(name) == folder)
    files = sorted((CORPUS / folder).iterdir())
    assert files
    assert {path.suffix for path in files} <= {".ok", ".bad"}
    found = {path.name: verdict(target, path.read_bytes()) for path in files}
    assert found == {path.name: path.suffix for path in files}


def verdict(target, data: bytes) -> str:
    """The end of the name of a file with this content; an error that the decoder must not raise, as text."""
    try:
        return ".ok" if check(target, data) else ".bad"
    except Exception as error:
        return repr(error)


def test_the_corpus_is_there():
    assert len(list(CORPUS.glob("*/*"))) >= 150


def folder_of(name: str) -> str:
    """A target's name without what a folder cannot have."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)
