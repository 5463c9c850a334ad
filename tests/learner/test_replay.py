import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

from tensordict import TensorDict  # noqa: E402

from zmqrl.config.training import ReplayBufferConfig  # noqa: E402
from zmqrl.learner.replay import ReplayBuffer  # noqa: E402


def buffer(cache=100, window=100, least=1):
    sizes = ReplayBufferConfig(cache_size=cache, sample_window_size=window, min_buffer_size=least)
    return ReplayBuffer(sizes, torch.device("cpu"))


def numbered(number, length):
    """Transitions of the trajectory `number`."""
    numbers = torch.arange(length, dtype=torch.float32) / 1000 + number
    return TensorDict({"observation": numbers[:, None]}, batch_size=[length])


def kept(replay):
    return replay.transitions()["observation"].flatten().tolist()


def test_only_the_newest_trajectories_are_kept():
    replay = buffer(cache=3)
    lengths = [4, 1, 7, 2, 5, 3, 6]
    for number, length in enumerate(lengths):
        replay.add(numbered(number, length))
        expected = [numbered(n, lengths[n]) for n in range(number + 1)][-3:]
        assert kept(replay) == torch.cat(expected)["observation"].flatten().tolist()


def test_samples_are_of_the_newest_window_and_of_all_of_it():
    replay = buffer(cache=5, window=2)
    for number in range(12):
        replay.add(numbered(number, 3 + number % 4))
    drawn = set(replay.sample(2000)["observation"].flatten().tolist())
    newest = torch.cat([numbered(10, 5), numbered(11, 6)])
    assert drawn == set(newest["observation"].flatten().tolist())


def test_transitions_are_sampled_uniformly_whatever_their_trajectory():
    replay = buffer()
    replay.add(numbered(0, 1))
    replay.add(numbered(1, 9))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = replay.sample(20_000)["observation"]
    assert (drawn < 1).float().mean().item() == pytest.approx(0.1, abs=0.01)


def test_a_trajectory_without_transitions_takes_a_place_and_is_never_sampled():
    replay = buffer(cache=2, window=1)
    replay.add(numbered(0, 3))
    replay.add(numbered(1, 0))
    assert not replay.ready
    replay.add(numbered(2, 3))
    assert replay.ready
    assert kept(replay) == numbered(2, 3)["observation"].flatten().tolist()


def test_it_is_ready_when_it_has_the_least_number_of_trajectories():
    replay = buffer(least=2)
    replay.add(numbered(0, 3))
    assert not replay.ready
    replay.add(numbered(1, 3))
    assert replay.ready


def test_its_state_restores_what_is_kept_and_a_smaller_cache_takes_the_newest():
    replay = buffer(cache=4)
    for number in range(6):
        replay.add(numbered(number, 1 + number))
    state = replay.state_dict()
    same = ReplayBuffer.of_state(
        state, ReplayBufferConfig(cache_size=4, sample_window_size=4), torch.device("cpu")
    )
    assert kept(same) == kept(replay)
    assert same.metrics() == replay.metrics()
    smaller = ReplayBuffer.of_state(
        state, ReplayBufferConfig(cache_size=2, sample_window_size=2), torch.device("cpu")
    )
    assert kept(smaller) == kept(replay)[-11:]
    smaller.add(numbered(6, 2))
    assert kept(smaller) == [*kept(replay)[-6:], *numbered(6, 2)["observation"].flatten().tolist()]
