"""Which start state an episode of an env has."""

from zmqrl.env.seeds import Seeds


def test_each_env_and_episode_has_a_seed_of_its_own() -> None:
    seeds = Seeds(base=100, first=2, total=4)
    assert [seeds(row) for row in (0, 1, 0, 1, 0)] == [102, 103, 106, 107, 110]
    seeds.restart()
    assert seeds(0) == 102


def test_after_states_were_lost_each_env_begins_the_episode_that_it_has_not_played() -> None:
    seeds = Seeds(base=100, first=0, total=2)
    for row in (0, 1, 0):
        seeds(row)
    # Of row 0 the second episode is under way; row 1 has ended its first, and resets next.
    seeds.begin_again([1, 1])
    assert [seeds(0), seeds(1)] == [102, 103]
