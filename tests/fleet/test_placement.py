"""Which rank gets a request, as a pure function."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.rollout.fleet.placement import RankLoad, choose

LOADS = st.builds(
    RankLoad,
    name=st.sampled_from("abcdef"),
    requests=st.integers(0, 6),
    slots=st.integers(0, 4),
    silent=st.booleans(),
)
RANKS = st.lists(LOADS, max_size=6, unique_by=lambda rank: rank.name)
HOMES = st.none() | st.sampled_from("abcdefg")


@given(RANKS, HOMES)
def test_the_choice_is_one_of_the_ranks_and_there_is_one_if_there_are_any(
    ranks: list[RankLoad], home: str | None
) -> None:
    assert (choose(ranks, home) in {rank.name for rank in ranks}) is bool(ranks)


@given(RANKS, HOMES)
def test_a_silent_rank_is_chosen_only_if_all_are(ranks: list[RankLoad], home: str | None) -> None:
    silent = {rank.name: rank.silent for rank in ranks}
    chosen = choose(ranks, home)
    if chosen is not None and silent[chosen]:
        assert all(silent.values())


@given(RANKS, HOMES)
def test_a_group_stays_at_home_while_it_has_room_there_and_else_no_rank_is_less_loaded(
    ranks: list[RankLoad], home: str | None
) -> None:
    alive = [rank for rank in ranks if not rank.silent] or ranks
    chosen = next((rank for rank in alive if rank.name == choose(ranks, home)), None)
    at_home = next((rank for rank in alive if rank.name == home), None)
    if chosen is None:
        return
    if at_home is not None and at_home.has_room:
        assert chosen is at_home
    elif chosen is not at_home:
        assert chosen.requests == min(rank.requests for rank in alive)


@given(RANKS, HOMES)
def test_a_full_home_is_left_exactly_when_somebody_has_room(ranks: list[RankLoad], home: str | None) -> None:
    alive = [rank for rank in ranks if not rank.silent] or ranks
    at_home = next((rank for rank in alive if rank.name == home), None)
    if at_home is None or at_home.has_room:
        return
    assert (choose(ranks, home) == home) is not any(rank.has_room for rank in alive) or min(
        alive, key=lambda rank: rank.requests
    ) is at_home


def test_groups_spread_over_the_ranks_and_their_requests_stay_together() -> None:
    loads = {"a": 0, "b": 0, "c": 0}
    homes: dict[int, set[str]] = {}
    for request in range(24):
        group = request // 4
        home = next(iter(homes.get(group, set())), None)
        chosen = choose([RankLoad(name, count, 8) for name, count in loads.items()], home)
        assert chosen is not None
        loads[chosen] += 1
        homes.setdefault(group, set()).add(chosen)
    assert loads == {"a": 8, "b": 8, "c": 8}
    assert all(len(found) == 1 for found in homes.values())
