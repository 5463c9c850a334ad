"""The env loop with real simulators and a real pool."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from conftest import TESTS, Pool, wait_for

from zmqrl import config
from zmqrl.env.worker import EnvWorker
from zmqrl.errors import EnvironmentFailure, PolicyError, PolicyTimeout
from zmqrl.process import StopSignal

SIM = f"env.factory={TESTS / 'sims.py'}:make"


def env_worker(pool: Pool, *overrides: str, mode: str = "eval", rank: int = 0) -> EnvWorker:
    loaded = config.load(None, [*pool.overrides, "cluster.component_placement.env=0-0", *overrides])
    return EnvWorker(loaded, mode, rank, StopSignal())  # type: ignore[arg-type]


@pytest.mark.parametrize("autoreset", ["disabled", "next_step", "same_step"])
@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_env_plays_its_episodes_in_every_autoreset_mode(
    pool: Pool, autoreset: str, stages: int
) -> None:
    pool.start(policy="Balance")
    worker = env_worker(
        pool,
        SIM,
        "env.kwargs.length=7",
        "env.eval={total_num_envs: 3, rollout_epoch: 4}",
        f"env.autoreset_mode={autoreset}",
        f"env.pipeline_stages={stages}",
    )
    assert worker.run()
    episodes = worker.reporter.episodes
    assert sorted((e.env, e.number) for e in episodes) == [(i, k) for i in range(3) for k in range(4)]
    for episode in episodes:
        assert (episode.length, episode.total_return) == (7, 7.0)
        assert episode.success_once
        assert episode.success_at_end
    assert worker.report.totals.env_steps == 3 * 4 * 7
    assert pool.counters()["requests"] == pool.counters()["answered"]


def test_a_fast_env_is_not_counted_beyond_its_episodes(pool: Pool, folder: Path) -> None:
    (folder / "mixed.py").write_text(
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "from sims import Counter\n"
        "lengths = iter([2, 9])\n"
        "def make(): return Counter(length=next(lengths))\n"
    )
    pool.start(policy="Balance")
    worker = env_worker(
        pool, f"env.factory={folder}/mixed.py:make", "env.eval={total_num_envs: 2, rollout_epoch: 3}"
    )
    assert worker.run()
    assert [e.length for e in worker.reporter.episodes if e.env == 0] == [2, 2, 2]
    assert [e.length for e in worker.reporter.episodes if e.env == 1] == [9, 9, 9]


def test_fixed_reset_states_do_not_depend_on_how_envs_are_shared_out(pool: Pool) -> None:
    pool.start(policy="Balance", damping=0)
    common = ["env.id=CartPole-v1", "env.eval={total_num_envs: 4, use_fixed_reset_state_ids: true}"]
    alone = env_worker(pool, *common)
    assert alone.run()
    lengths = {e.env: e.length for e in alone.reporter.episodes}
    shared = {}
    for rank in range(2):
        worker = env_worker(pool, *common, "cluster.component_placement.env=0-1", rank=rank)
        assert worker.run()
        shared.update({e.env: e.length for e in worker.reporter.episodes})
    assert shared == lengths
    assert len(set(lengths.values())) > 1


def test_ignored_terminations_let_episodes_run_to_the_time_limit(pool: Pool) -> None:
    pool.start(policy="Balance", damping=-5)  # falls at once
    worker = env_worker(
        pool,
        "env.id=MountainCar-v0",
        "env.eval={total_num_envs: 2, ignore_terminations: true, max_episode_steps: 30}",
    )
    assert worker.run()
    assert [e.length for e in worker.reporter.episodes] == [30, 30]


def test_a_simulator_that_raises_is_an_error_that_names_it(pool: Pool) -> None:
    pool.start(policy="Balance")
    worker = env_worker(pool, SIM, "env.kwargs.raise_at=3")
    with pytest.raises(EnvironmentFailure, match=r"sims\.py:make failed in step.*exploded at step 3"):
        worker.run()


def test_actions_of_the_wrong_shape_are_an_error_with_both_shapes(pool: Pool) -> None:
    pool.start(policy="Balance")
    worker = env_worker(pool, "env.id=Pendulum-v1")
    with pytest.raises(EnvironmentFailure, match=r"\(1, 1\).*\(1,\)"):
        worker.run()


def test_a_reply_without_actions_is_an_error_that_names_what_it_has(pool: Pool, folder: Path) -> None:
    (folder / "odd.py").write_text("def make():\n    return lambda o: {'action': o[:, 0]}\n")
    pool.start_broker()
    pool.launcher.start(
        "rollout-0", ["start-rollout-worker", *pool.overrides, f"--policy={folder}/odd.py:make"]
    )
    worker = env_worker(pool, SIM)
    with pytest.raises(PolicyError, match="no 'actions'; its dict has 'action'"):
        worker.run()


def test_without_rollout_workers_an_env_worker_gives_up_after_its_time_limit(pool: Pool) -> None:
    pool.start(workers=0)
    worker = env_worker(pool, SIM, "env.request_timeout_s=1.5")
    with pytest.raises(PolicyTimeout, match="0 rollout workers"):
        worker.run()


def test_a_stopped_train_worker_says_goodbye_and_leaves_nothing_open(pool: Pool) -> None:
    pool.start(policy="Balance")
    loaded = config.load(None, [*pool.overrides, "cluster.component_placement.env=0-0", SIM])
    stop = StopSignal()
    worker = EnvWorker(loaded, "train", 0, stop)
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(worker.run()))
    thread.start()
    wait_for(lambda: pool.counters()["answered"] > 50, "the worker to step")
    stop.reason = "SIGTERM"
    thread.join()
    assert ended == [False]
    wait_for(lambda: pool.status()["clients"] == [], "the goodbye")
    assert pool.status()["open_requests"] == 0
    assert len(worker.reporter.episodes) > 1


def test_async_simulators_fork_before_the_worker_opens_its_sockets(pool: Pool) -> None:
    pool.start(policy="Balance")
    worker = env_worker(
        pool, SIM, "env.vectorization=async", "env.eval={total_num_envs: 2, rollout_epoch: 2}"
    )
    assert worker.run()
    assert len(worker.reporter.episodes) == 4


def test_a_success_key_that_the_simulator_never_reports_is_a_warning(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.start(policy="Balance")
    assert env_worker(pool, SIM, "env.success_key=goal_reached").run()
    assert "goal_reached" in caplog.text


def test_emulated_delays_are_reported(pool: Pool) -> None:
    pool.start(policy="Balance")
    worker = env_worker(
        pool, SIM, "env.delay_sampler={type: constant, delay: 0.01, per_worker: {0: 2.0}}"
    )
    assert worker.run()
    assert worker.report.delays["median"] == worker.report.delays["max"] == pytest.approx(0.02)
    assert worker.report.totals.delay_s >= 0.02 * 10
    median = worker.report.totals.step_times.quantile(0.5)
    assert median is not None
    assert median >= 0.0195, "the time of a step has its delay"
