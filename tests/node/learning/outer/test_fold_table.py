"""A table behind Θ that rounds write depends on the sets and their order; members of several k in one sum."""

from itertools import permutations

import pytest
import torch

from atoll.node.learning.outer.fixed import plus
from atoll.node.learning.outer.mean import outer_update
from atoll.node.learning.outer.mixed_fold import fold_mixed
from atoll.protocols.errors import Divergence
from tests.node.learning.outer.conftest import DirectFold


def table_after(number):
    """Even rounds write what depends on the table before them and on their set."""

    def write(state_S4096, fresh):
        state_S4096[-1, 0] = 31 * state_S4096[-1, 0] % 10007 + sum(one.entry[0] for one in fresh.members)

    return None if number % 2 else write


def fold_of(world):
    def onto(fresh, theta_N4096):
        out, rows = theta_N4096.clone(), min(len(theta_N4096), world.arena.chunks)
        out[:rows] = plus(theta_N4096[:rows], world.update(fresh.members, rows))
        return out

    state = torch.cat([world.theta, torch.zeros((1, 4096), dtype=torch.int32)])
    more = {"table_after": table_after, "table_rows": 1}
    return DirectFold(state, world.arena, onto, lambda _: world.cover, **more)


def test_a_table_depends_on_the_sets_and_not_on_when_they_came(world):
    sets = [[world.part(salt) for salt in salts] for salts in ((0, 1), (2, 3), (4, 5))]
    plain = fold_of(world)
    for number, members in enumerate(sets):
        plain.finalize(number, members)
    assert int(plain.final_state_S4096[-1, 0])
    for order in permutations(range(3)):
        fold = fold_of(world)
        for number in order:
            fold.set_round(number, sets[number][:1])
        for number in order[::-1]:
            fold.set_round(number, sets[number])
        assert fold.view_digest() == plain.state_digest()
        assert [fold.finalize(number, members) for number, members in enumerate(sets)][-1] == plain.state_digest()


def tables(seed, k, chunks=3):
    luck = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(4096, generator=luck)[:k].sort().values for _ in range(chunks)])
    q = torch.randint(-(12 << 24), (12 << 24) + 1, (chunks, k), generator=luck)
    return index, q * (torch.arange(chunks) != 1)[:, None] if seed == 2 else q


@pytest.mark.parametrize("floor_256", [0, 64, 256])
def test_members_of_several_k_give_the_bits_of_the_definition(floor_256):
    members = [(weight, *tables(seed, k)) for seed, (weight, k) in enumerate([(64, 16), (1, 64), (255, 1024)])]
    out = torch.arange(3 * 4096, dtype=torch.int32).view(3, 4096)
    wanted = out + outer_update(members, 3, 179, floor_256)
    fold_mixed(out, members, 179, floor_256)
    assert torch.equal(out, wanted)


def test_a_sum_of_several_k_that_leaves_its_range_is_divergence():
    members = [(64, torch.zeros((1, 1), dtype=torch.int64), torch.full((1, 1), -4)) for _ in range(2)]
    with pytest.raises(Divergence, match="left its range"):
        fold_mixed(torch.full((1, 4096), 2**31 - 1, dtype=torch.int32), members, 256, 0)
