import statistics

import pytest

from zmqrl.config import DelayConfig, StallConfig
from zmqrl.env.delays import DelaySampler


def draw(config: DelayConfig, rank: int = 0, steps: int = 2_000) -> list[float]:
    sampler = DelaySampler(config, rank)
    return [sampler.sample(step) for step in range(steps)]


UNIFORM = DelayConfig(type="uniform", low=0.1, high=0.2)


def test_a_constant_delay_is_the_same_at_each_step():
    assert draw(DelayConfig(delay=0.25), steps=3) == [0.25, 0.25, 0.25]


def test_a_uniform_delay_stays_within_its_bounds():
    samples = draw(UNIFORM)
    assert 0.1 <= min(samples) < max(samples) <= 0.2
    assert statistics.fmean(samples) == pytest.approx(0.15, rel=0.05)


def test_an_exponential_delay_has_the_given_mean():
    samples = draw(DelayConfig(type="exponential", mean=0.1))
    assert statistics.fmean(samples) == pytest.approx(0.1, rel=0.1)
    assert min(samples) >= 0


def test_a_gaussian_delay_is_never_negative():
    samples = draw(DelayConfig(type="gaussian", mean=0.1, std=0.2))
    assert min(samples) == 0.0
    assert max(samples) > 0.3


def test_a_tail_delay_adds_its_extra_at_the_given_rate():
    samples = draw(DelayConfig(type="tail", base=0.01, probability=0.1, extra=1.0))
    assert set(samples) == {0.01, 1.01}
    assert samples.count(1.01) / len(samples) == pytest.approx(0.1, abs=0.03)


def test_the_same_seed_and_rank_give_the_same_delays():
    assert draw(UNIFORM, rank=3) == draw(UNIFORM, rank=3)


def test_ranks_and_seeds_give_delays_of_their_own():
    other_seed = UNIFORM.model_copy(update={"seed": 1})
    sequences = [draw(UNIFORM, rank=0), draw(UNIFORM, rank=1), draw(other_seed, rank=0)]
    assert len({tuple(sequence) for sequence in sequences}) == 3


def test_the_factor_of_a_worker_multiplies_its_delays_only():
    config = DelayConfig(delay=0.1, per_worker={1: 10.0})
    assert draw(config, rank=0, steps=1) == [0.1]
    assert draw(config, rank=1, steps=1) == [1.0]


def test_a_stall_is_added_once_at_its_step_of_its_rank():
    config = DelayConfig(delay=0.1, stall=StallConfig(rank=1, at_step=2, seconds=5))
    assert draw(config, rank=1, steps=4) == [0.1, 0.1, 5.1, 0.1]
    assert draw(config, rank=0, steps=4) == [0.1] * 4
    sampler = DelaySampler(config, rank=1)
    assert [sampler.sample(2), sampler.sample(2)] == [5.1, 0.1]


def test_metrics_describe_what_was_sampled():
    config = DelayConfig(delay=1.0, stall=StallConfig(rank=0, at_step=1, seconds=2))
    sampler = DelaySampler(config, rank=0)
    for step in range(4):
        sampler.sample(step)
    assert sampler.metrics() == {"average": 1.5, "median": 1.0, "max": 3.0, "min": 1.0}


def test_metrics_are_zero_before_the_first_sample():
    metrics = DelaySampler(UNIFORM, rank=0).metrics()
    assert metrics == {"average": 0.0, "median": 0.0, "max": 0.0, "min": 0.0}
