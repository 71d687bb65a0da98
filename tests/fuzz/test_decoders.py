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


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_of_the_corpus_has_its_verdict(path):
    """The folder is named after a target; `NAME.bad` must be refused, `NAME.ok` taken."""
    target = next(target for name, target in targets().items() if folder_of(name) == path.parent.name)
    assert check(target, path.read_bytes()) == (path.suffix == ".ok")


def test_the_corpus_is_there():
    assert len(list(CORPUS.glob("*/*"))) >= 150


def folder_of(name: str) -> str:
    """A target's name without what a folder cannot have."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)
