"""What the metrics say of what env workers and the broker report."""

from __future__ import annotations

import io
import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import zmq
from conftest import wait_for
from rich.console import Console

from zmqrl.errors import DecodeError, EndpointError
from zmqrl.telemetry.jsonl import JsonLines
from zmqrl.telemetry.live import LiveLine
from zmqrl.telemetry.metrics import EnvView, bottleneck, episode_metrics, run_metrics
from zmqrl.telemetry.report import Collector, EnvTotals, Episode, Report, Reporter, unpack
from zmqrl.telemetry.table import summary
from zmqrl.transport.codec import encode_meta


def episode(env: int, total: float, length: int, once: bool | None, end: bool | None) -> Episode:
    return Episode(env, 0, total, length, once, end)


def view(name: str, episodes: list[Episode], expected: int, **totals: float) -> EnvView:
    report = Report(name, 0, began=10.0, ended=20.0, totals=EnvTotals(**totals))  # type: ignore[arg-type]
    return EnvView(name, expected, report, episodes)


def test_success_return_and_length_are_means_over_episodes() -> None:
    envs = [
        view("eval-0", [episode(0, 1.0, 10, True, False), episode(1, 3.0, 30, False, False)], 2),
        view("eval-1", [episode(2, 5.0, 20, True, True)], 2),
    ]
    metrics = episode_metrics(envs)
    assert metrics["eval/num_trajectories"] == 3
    assert metrics["eval/missing_trajectories"] == 1
    assert metrics["eval/success_once"] == pytest.approx(2 / 3)
    assert metrics["eval/fail_once"] == pytest.approx(1 / 3)
    assert metrics["eval/success_at_end"] == pytest.approx(1 / 3)
    assert metrics["eval/return"] == 3.0
    assert metrics["eval/episode_len"] == 20.0
    assert metrics["eval/reward"] == pytest.approx(9.0 / 60)


def test_without_a_success_key_there_is_no_success_metric() -> None:
    metrics = episode_metrics([view("eval-0", [episode(0, 1.0, 10, None, None)], 1)])
    assert not any("success" in name or "fail" in name for name in metrics)


def test_steps_a_second_count_from_the_first_request_to_the_last_step_of_all() -> None:
    early, late = view("a", [], 0, env_steps=300), view("b", [], 0, env_steps=700)
    assert late.report is not None
    late.report.began, late.report.ended = 15.0, 30.0
    metrics = run_metrics([early, late], {}, 1)
    assert metrics["env_steps_per_s"] == 1000 / 20


def test_a_worker_that_was_restarted_plays_its_episodes_anew_and_its_steps_add_up() -> None:
    env = EnvView("eval-0", 2)
    first = episode(0, 1.0, 10, None, None)
    totals = EnvTotals(env_steps=15, shard_steps=15)
    env.take(Report("eval-0", 0, 1, began=10.0, ended=20.0, totals=totals, episodes=[first]), now=20.0)
    assert (env.missing(), env.stepped()) == (1, True)
    env.take(Report("eval-0", 0, 2), now=22.0)
    assert (env.missing(), env.ended(), env.stepped()) == (2, False, True)
    again = [episode(0, 2.0, 10, None, None), episode(1, 2.0, 10, None, None)]
    totals = EnvTotals(env_steps=20, shard_steps=20)
    last = Report(
        "eval-0", 0, 2, 0, began=25.0, ended=45.0, finished=True, totals=totals, episodes=again
    )
    env.take(last, now=45.0)
    assert env.ended()
    metrics = {**episode_metrics([env]), **run_metrics([env], {}, 1)}
    assert (metrics["eval/num_trajectories"], metrics["eval/return"]) == (2, 2.0)
    assert metrics["env_steps"] == 35
    assert metrics["env_steps_per_s"] == 1.0, "from the first actions of all to the last step"


def test_what_a_killed_worker_had_on_its_way_counts_as_sent_only_if_it_arrived() -> None:
    env = EnvView("env-0")
    totals = EnvTotals(trajectories_sent=5, trajectories_unacknowledged=2)
    env.take(Report("env-0", 0, incarnation=1, totals=totals), now=1.0)
    assert env.totals().trajectories_sent == 5
    env.take(Report("env-0", 0, incarnation=2, totals=EnvTotals(trajectories_sent=1)), now=2.0)
    assert env.totals().trajectories_sent == 4
    assert env.totals().trajectories_unacknowledged == 0


def test_times_are_means_of_one_call() -> None:
    env = view(
        "a",
        [],
        0,
        shard_steps=10,
        requests=8,
        resets=2,
        step_s=1.0,
        delay_s=2.0,
        reset_s=0.5,
        wait_s=4.0,
        queue_s=2.0,
        predict_s=0.8,
    )
    metrics = run_metrics([env], {}, 1)
    assert metrics["time/env/step"] == pytest.approx(0.3)
    assert metrics["time/env/reset"] == pytest.approx(0.25)
    assert metrics["time/env/wait"] == pytest.approx(0.5)
    assert metrics["time/broker/queue"] == pytest.approx(0.25)
    assert metrics["time/rollout/predict"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("totals", "busy", "limit"),
    [
        (EnvTotals(step_s=6.0, wait_s=4.0), 0.1, "env"),
        (EnvTotals(step_s=1.0, delay_s=5.0, wait_s=4.0, queue_s=4.0), 0.9, "env"),
        (EnvTotals(step_s=1.0, wait_s=4.0, queue_s=3.5, predict_s=0.5), 0.9, "rollout"),
        (EnvTotals(step_s=1.0, wait_s=4.0, queue_s=0.5, predict_s=3.0), 0.3, "rollout"),
        (EnvTotals(step_s=1.0, wait_s=4.0, queue_s=3.5, predict_s=0.5), 0.3, "queue"),
    ],
)
def test_the_bottleneck_is_where_the_time_goes(totals: EnvTotals, busy: float, limit: str) -> None:
    assert bottleneck(totals, busy) == limit


def test_the_tables_name_lost_workers_missing_episodes_and_the_limit() -> None:
    status = {
        "counters": {"batches": 5, "shards": 10, "rows": 40, "requests": 10, "answered": 10},
        "workers": [{"name": "rollout-1"}],
        "totals": {
            name: {"batches": 5, "shards": 10, "rows": 40, "predict_s": 1.0}
            for name in ("rollout-0", "rollout-1")
        },
    }
    gone = view("eval-1", [], 4)
    gone.gave_up = "was killed"
    envs = [view("eval-0", [episode(0, 1.0, 10, True, True)], 1, env_steps=10, step_s=5.0), gone]
    screen = io.StringIO()
    metrics = {**episode_metrics(envs), **run_metrics(envs, status, 2)}
    Console(file=screen, width=120).print(summary(metrics, envs, status))
    for words in ("rollout-0 (lost)", "eval-1 (lost)", "0 of 4", "Limited by env", "100.0%", "2.00"):
        assert words in screen.getvalue()


def test_without_a_terminal_the_live_line_is_plain_text() -> None:
    screen = io.StringIO()
    live = LiveLine(Console(file=screen, width=80), episodes=4)
    live.say("eval-0", "[not markup] hello")
    live.update([])
    live.close()
    assert screen.getvalue() == "[eval-0] [not markup] hello\n"


def test_reports_arrive_as_they_were_sent(folder: Path) -> None:
    endpoint = f"ipc://{folder}/report"
    collector, reporter = Collector(endpoint), Reporter(endpoint)
    report = Report("eval-3", 3, began=1.5, totals=EnvTotals(env_steps=7, wait_s=0.25))
    reporter.add(episode(5, 2.5, 9, True, False))
    reporter.send(report)
    (received,) = collector.collect(10.0)
    assert received.episodes == [episode(5, 2.5, 9, True, False)]
    assert (received.name, received.rank, received.totals) == ("eval-3", 3, report.totals)
    reporter.close()
    collector.close()


def test_a_worker_without_an_end_keeps_its_latest_episodes_only() -> None:
    reporter, whole = Reporter(None, keeps=10), Reporter(None)
    for number in range(1000):
        for one in (reporter, whole):
            one.add(episode(number, 1.0, 1, number == 5 or None, None))
    assert (reporter.count, reporter.told_success) == (1000, True)
    assert 10 <= len(reporter.episodes) <= 20
    assert reporter.episodes[-1].env == 999
    assert len(whole.episodes) == 1000


def test_episodes_wait_for_a_collector_that_comes_later(folder: Path) -> None:
    endpoint = f"ipc://{folder}/report"
    reporter = Reporter(endpoint)
    reporter.add(episode(0, 1.0, 1, None, None))
    reporter.send(Report("eval-0", 0))  # nobody listens yet
    collector = Collector(endpoint)

    def arrived() -> list[Episode]:
        reporter.send(Report("eval-0", 0))
        return [e for report in collector.collect(0.1) for e in report.episodes]

    assert wait_for(arrived, "the episode") == [episode(0, 1.0, 1, None, None)]
    reporter.close()
    collector.close()


def test_more_episodes_than_one_report_holds_arrive_in_several(folder: Path) -> None:
    endpoint = f"ipc://{folder}/report"
    collector, reporter = Collector(endpoint), Reporter(endpoint)
    for number in range(20_000):
        reporter.add(Episode(number, 0, 1.0, 1, True, True))
    reporter.send(Report("eval-0", 0))
    arrived: list[int] = []

    def all_arrived() -> bool:
        arrived.extend(e.env for report in collector.collect(0.1) for e in report.episodes)
        return len(arrived) >= 20_000

    wait_for(all_arrived, "the episodes")
    assert arrived == list(range(20_000))
    reporter.close()
    collector.close()


def test_nonsense_at_the_collector_is_skipped(folder: Path) -> None:
    endpoint = f"ipc://{folder}/report"
    collector, reporter = Collector(endpoint), Reporter(endpoint)
    stranger = zmq.Context.instance().socket(zmq.PUSH)
    stranger.connect(endpoint)
    for data in (b"", b"\xc1", b"\x80", Report("x", 0).pack()[:-1]):
        stranger.send(data)
    reporter.send(Report("eval-0", 0))
    names = wait_for(lambda: [r.name for r in collector.collect(0.1)], "the report")
    assert names == ["eval-0"]
    for socket in (stranger, reporter, collector):
        socket.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_second_reader_of_reports_is_refused_and_the_first_goes_on(
    folder: Path, free_ports: list[int], transport: str
) -> None:
    ends = {"ipc": f"ipc://{folder}/report", "tcp": f"tcp://127.0.0.1:{free_ports[0]}"}
    endpoint = ends[transport]
    collector, reporter = Collector(endpoint), Reporter(endpoint)
    for _ in range(2):
        with pytest.raises(EndpointError, match="in use"):
            Collector(endpoint)
    reporter.send(Report("eval-0", 0))
    assert wait_for(lambda: [r.name for r in collector.collect(0.1)], "the report") == ["eval-0"]
    reporter.close()
    collector.close()


def test_a_report_with_wrong_fields_is_refused() -> None:
    with pytest.raises(DecodeError):
        unpack(b"\x81\xa4name\xa1x")


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": 3},
        {"rank": "0"},
        {"rank": -1},
        {"rank": True},
        {"incarnation": None},
        {"evaluation": 1.5},
        {"began": "now"},
        {"finished": 1},
        {"totals": []},
        {"totals": {"wait_s": "long"}},
        {"totals": {"env_steps": None}},
        {"totals": {"env_steps": 2.5}},
        {"totals": {"nobody knows": 1}},
        {"delays": 1},
        {"delays": {"average": 1.0}},
        {"delays": {"average": 1.0, "max": None, "median": 1.0, "min": 1.0}},
        {"episodes": None},
        {"episodes": [None]},
        {"episodes": [{"env": 1}]},
        {"episodes": [{**asdict(episode(0, 1.0, 1, True, None)), "total_return": "much"}]},
        {"episodes": [{**asdict(episode(0, 1.0, 1, True, None)), "success_once": 1}]},
        {"more": 1},
        {"learner": None},
        {"learner": {"metrics": []}},
        {"learner": {"metrics": {"env_steps": "many"}}},
        {"learner": {"metrics": {"env_steps": None}}},
        {"learner": {"finished": "no"}},
    ],
    ids=repr,
)
def test_a_report_that_nobody_could_count_with_is_refused(wrong: dict[str, Any]) -> None:
    good = Report("eval-0", 0, episodes=[episode(0, 1.0, 1, True, None)])
    assert unpack(good.pack()) == good
    with pytest.raises(DecodeError):
        unpack(encode_meta({**asdict(good), **wrong}))


def test_a_flood_of_nonsense_does_not_keep_the_reader_of_reports(folder: Path) -> None:
    collector = Collector(f"ipc://{folder}/report")
    stopping = threading.Event()

    def flood() -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(f"ipc://{folder}/report")
            while not stopping.is_set():
                if stranger.poll(100, zmq.POLLOUT):
                    stranger.send(b"\xc1" * 1000)

    floods = [threading.Thread(target=flood) for _ in range(2)]
    for thread in floods:
        thread.start()
    begin = time.monotonic()
    for _ in range(3):
        assert collector.collect(0.1) == []
    assert time.monotonic() - begin < 20
    stopping.set()
    for thread in floods:
        thread.join()
    collector.close()


def test_json_lines_are_on_disk_one_record_a_line(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for value in (1.0, 2.0):
        lines.write({"eval/return": value})
        records = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(records[-1])["eval/return"] == value
    assert len(records) == 2
    lines.close()
