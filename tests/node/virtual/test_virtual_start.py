"""Runs whose Θ₀ is a file: who has it gives it, who needs it waits and says so, who comes late needs it not."""

import asyncio

import pytest
from msgspec.structs import replace

from atoll.node.daemon.assets import moments as run_moments
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import ConfigError, Divergence
from atoll.protocols.ids import digest
from atoll.protocols.run.experts import experts_in
from atoll.protocols.run.run_spec import StartSpec

from .conftest import EXPERTS, snapshot_file

STATE = digest(b"given")
FILE = snapshot_file(-1, STATE)
WAITING = "waiting for the start weights: nobody reachable has them yet"


def given(world, data=FILE, state=STATE):
    """The run now starts from this file, which the owner (node 0) has."""
    blob = manifest_of_bytes(data).id
    world.spec = replace(world.spec, start=StartSpec(weights=blob, state=state))
    home = world.root / "n0"
    home.mkdir(exist_ok=True)
    assert BlobStore(home / "blobs").add_bytes(data) == blob
    return blob


def holds(node, blob):
    return node.swarm is not None and node.swarm.blobs.store.has(blob)


def test_all_begin_with_the_owners_file(world):
    async def story() -> None:
        async with world(6, 4) as w:
            blob = given(w)
            for number in range(4):
                w.start(number)
            await w.until(w.all_final)
            w.check_agreement()
            for node in w.nodes.values():
                assert node.worker.trained == list(range(6))
                assert holds(node, blob)

    run_virtual(story())


def test_members_wait_for_the_file_and_say_so(world):
    async def story() -> None:
        async with world(4, 2) as w:
            given(w)
            one, other = w.start(1), w.start(2)
            await asyncio.sleep(60)
            for node in (one, other):
                assert node.driver is not None
                assert node.driver.round.syncing == WAITING
                assert node.worker.trained == []
                assert node.driver.finalizer.applied == -2
            w.start(0)
            await w.until(lambda: w.all_final(1))
            w.check_agreement()

    run_virtual(story())


def test_members_have_it_from_each_other(world):
    """The owner is there only until one of them has the file."""

    async def story() -> None:
        async with world(5, 2) as w:
            blob = given(w)
            first = w.start(1)
            w.start(0)
            await w.until(lambda: holds(first, blob) and first.worker.final == -1)
            await w.kill(0)
            last = w.start(2)
            await w.until(lambda: last.worker.trained)
            assert holds(last, blob)

    run_virtual(story())


def test_who_comes_late_starts_from_a_snapshot_and_nobody_keeps_the_file(world):
    async def story() -> None:
        async with world(40, 2) as w:
            blob = given(w)
            first, second = w.start(0), w.start(1)
            await w.until(lambda: second.worker.final >= 16)
            assert not holds(second, blob), "two newer snapshots are here"
            assert holds(first, blob), "the owner keeps it"
            first.swarm.blobs.store.delete(blob)
            late = w.start(2)
            await w.until(lambda: late.worker.final >= 20)
            assert not holds(late, blob)
            assert late.worker.trained
            w.check_agreement()

    run_virtual(story())


def test_moments_of_a_checkpoint_are_kept_by_the_owner_and_by_others_until_they_are_old(world):
    async def story() -> None:
        async with world(20, 2) as w:
            given(w)
            data = b"moments" * 200_000
            moments = manifest_of_bytes(data).id
            w.spec = replace(w.spec, start=replace(w.spec.start, moments=moments))
            for number in range(2):
                (w.root / f"n{number}").mkdir(exist_ok=True)
                BlobStore(w.root / f"n{number}" / "blobs").add_bytes(data)
            first, second = w.start(0), w.start(1)
            await w.until(lambda: second.worker.final >= 1)
            assert holds(second, moments), "it is larger than a payload, and still no old snapshot"
            await w.until(lambda: second.worker.final >= 16)
            assert not holds(second, moments)
            assert holds(first, moments)

    run_virtual(story())


def test_a_restart_needs_the_file_no_more(world):
    async def story() -> None:
        async with world(4, 1) as w:
            blob = given(w)
            node = w.start(0)
            await w.until(lambda: node.worker.final == -1)
            await w.kill(0)
            (w.root / "n0/blobs" / f"{blob.hex()}.blob").unlink()
            w.start(0)
            await w.until(w.all_final)

    run_virtual(story())


@pytest.mark.parametrize("data", [FILE + b"more", snapshot_file(0, STATE), b"", b"x" * (1 << 20)])
def test_a_run_whose_file_is_not_what_it_says_ends_in_one_line(world, data):
    async def story() -> None:
        async with world(4, 1) as w:
            given(w, data)
            w.start(1)
            w.start(0)
            await asyncio.sleep(100)

    with pytest.raises(BaseExceptionGroup) as caught:
        run_virtual(story())
    fault = leaf(caught.value)
    assert isinstance(fault, ConfigError)
    assert "start weights of this run cannot be used" in fault.line()


def test_a_file_that_the_disk_damaged_is_fetched_again(world):
    async def story() -> None:
        async with world(4, 2) as w:
            blob = given(w)
            store = BlobStore(w.root / "n0/blobs")
            (w.root / "n1").mkdir()
            BlobStore(w.root / "n1/blobs").add_bytes(FILE)
            path = w.root / "n1/blobs" / f"{blob.hex()}.blob"
            path.write_bytes(b"y" * len(FILE))
            assert store.has(blob)
            w.start(0)
            node = w.start(1)
            await w.until(w.all_final)
            assert node.worker.trained
            assert path.read_bytes() == FILE

    run_virtual(story())


def test_saved_start_weights_of_another_run_are_a_divergence(world):
    async def story() -> None:
        async with world(4, 1) as w:
            given(w)
            node = w.start(0)
            node.worker.final = -1
            await asyncio.sleep(30)

    with pytest.raises(BaseExceptionGroup) as caught:
        run_virtual(story())
    assert isinstance(leaf(caught.value), Divergence)


def leaf(error):
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def test_who_comes_back_knows_that_the_run_has_begun(world):
    """Before it hears anybody: it must not wait for the files that round 0 alone needs."""

    async def story() -> None:
        async with world(6, 2) as w:
            node, _ = w.start(0), w.start(1)
            await w.until(lambda: node.driver is not None)
            assert not node.driver.has_begun()
            await w.until(w.all_final)
            await w.kill(0)
            again = w.start(0)
            await w.until(lambda: again.driver is not None, look_s=0.001)
            await asyncio.sleep(0.001)
            assert again.driver.has_begun()

    run_virtual(story())


def test_each_fetches_the_moments_of_its_own_experts(world):
    """The owner has a file of each expert; a member that trains two of eight gets two, before it takes a step."""

    async def story() -> None:
        async with world(2, 4, holders=1) as w:
            files = [b"moments of file %d" % number for number in range(1 + EXPERTS)]
            blobs = [manifest_of_bytes(data).id for data in files]
            given(w)
            w.spec = replace(w.spec, start=replace(w.spec.start, moments=b"".join(blobs)))
            w.spec.check()
            for data in files:
                BlobStore(w.root / "n0" / "blobs").add_bytes(data)
            for number in range(4):
                w.start(number)
            await w.until(lambda: all(node.worker.trained for node in w.nodes.values()))
            for number, node in w.nodes.items():
                share = experts_in(node.worker.owned[0], EXPERTS)
                assert len(share) == 2
                held = {at for at, blob in enumerate(blobs) if holds(node, blob)}
                assert held == (set(range(1 + EXPERTS)) if number == 0 else {0, *(1 + one for one in share)})
            await w.until(w.all_final)
            w.check_agreement()

    run_virtual(story())


def test_a_round_begins_without_moments_that_nobody_has(world, monkeypatch):
    monkeypatch.setattr(run_moments, "PATIENCE_S", 60.0)

    async def story() -> None:
        async with world(1, 2, holders=1) as w:
            given(w)
            moments = b"".join(digest(b"gone", bytes([number])) for number in range(1 + EXPERTS))
            w.spec = replace(w.spec, start=replace(w.spec.start, moments=moments))
            nodes = [w.start(number) for number in range(2)]
            await asyncio.sleep(40)
            assert all("waiting for the moments" in node.driver.training.waiting for node in nodes)
            assert not any(node.worker.trained for node in nodes)
            await w.until(w.all_final)
            assert [node.driver.training.waiting for node in nodes] == ["", ""]
            w.check_agreement()

    run_virtual(story())
