"""The command line as the tests of `cli` call it, and a short text for the trials of `bench byzantine`."""

import msgspec
import pytest

from tests.cli.conftest import atoll

__all__ = ["atoll"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> object:
    """2,048 windows of synthetic text."""
    # torch takes a second, and most benches do without it
    from atoll.node.learning.data.dataset import open_dataset
    from atoll_bench.byzantine.trial import Case, spec_of

    spec = spec_of(Case("mean", None, 0))
    source = msgspec.structs.replace(spec.data, source="synthetic:markov?size=65536", digest=b"")
    return open_dataset(source, spec.model.context, "", tmp_path_factory.mktemp("data"))
