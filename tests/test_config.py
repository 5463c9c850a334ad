"""The configuration: what is wrong, where, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TESTS

from zmqrl import config
from zmqrl.errors import ConfigError

CONFIGS = sorted((TESTS.parent / "config").rglob("*.yaml"))
LINKS = "cluster.net_emulation."


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    config.load(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_written_configuration_reads_back_equal(path: Path, tmp_path: Path) -> None:
    loaded = config.load(path, ["rollout.max_wait_ms=2.5"])
    config.dump(loaded, tmp_path / "c.yaml")
    assert config.load(tmp_path / "c.yaml") == loaded


def test_decoupled_mode_is_off_unless_it_is_switched_on() -> None:
    assert not config.load().runner.enable_decoupled_mode
    assert config.load(None, ["runner.enable_decoupled_mode=true"]).runner.enable_decoupled_mode


def test_later_overrides_win_over_earlier_ones_and_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("rollout: {rollout_queue_size: 1, max_batch_rows: 5}\n")
    loaded = config.load(file, ["rollout.rollout_queue_size=2", "rollout.rollout_queue_size=3"])
    assert (loaded.rollout.rollout_queue_size, loaded.rollout.max_batch_rows) == (3, 5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("runner.enable_decoupeld_mode=true", ["runner.enable_decoupeld_mode", "enable_decoupled_mode"]),
        ("rolout.rollout_queue_size=1", ["rolout", "did you mean 'rollout'"]),
        ("zzz=1", ["zzz", "known keys", "runner"]),
        ("rollout.rollout_queue_size=-1", ["rollout.rollout_queue_size", "greater", "-1"]),
        ("rollout.rollout_queue_size=many", ["rollout.rollout_queue_size", "integer", "many"]),
        ("rollout.max_wait_ms=.nan", ["rollout.max_wait_ms"]),
        ("rollout.attempt_timeout_s=0", ["rollout.attempt_timeout_s"]),
        ("broker.heartbeat_timeout_s=7000", ["broker.heartbeat_timeout_s", "600"]),
        ("broker.frontend=127.0.0.1:5757", ["broker.frontend", "tcp://HOST:PORT"]),
        ("broker.backend=ipc://" + "x" * 200, ["broker.backend", "shorter"]),
        ("cluster.component_placement.env=1-4", ["component_placement.env", "from 0"]),
        ("cluster.component_placement.rollout=all", ["component_placement.rollout", "0-2 means three"]),
        ("env.delay_sampler.type=unifrom", ["env.delay_sampler.type", "uniform", "unifrom"]),
        ("env.delay_sampler={type: constant, high: 1}", ["env.delay_sampler", "delay", "high"]),
        ("env.delay_sampler={type: uniform, low: 2, high: 1}", ["env.delay_sampler", "below low"]),
        ("env.delay_sampler={per_worker: {1: -2}}", ["per_worker", "negative"]),
        ("env.delay_sampler={per_worker: {8: 2}}", ["env.delay_sampler", "env worker 8", "only 8"]),
        ("env.eval.delay_sampler={stall: {rank: 9, at_step: 1, seconds: 1}}", ["env worker 9"]),
        ("env.delay_sampler.type=tail", ["env.delay_sampler", "needs base, extra, probability"]),
        ("env={id: A, factory: b:c}", ["env", "either id or factory"]),
        ("env.eval.total_num_envs=3", ["env.eval.total_num_envs is 3", "at least 8"]),
        ("env.eval.rollout_epoch=0", ["env.eval.rollout_epoch"]),
        ("env=3", ["env", "3"]),
        ("rollout.static_batch_sizes=[4,1]", ["rollout", "[4, 1]", "ascend"]),
        ("rollout.static_batch_sizes=[0,1]", ["rollout", "[0, 1]", "from 1"]),
        ("rollout.static_batch_sizes=4", ["rollout.static_batch_sizes", "list", "4"]),
        ("rollout={static_batch_sizes: [1, 8], max_batch_rows: 9}", ["max_batch_rows is 9", "is 8"]),
        (f"{LINKS}crossdc_pairs=[{{src: Arm:0, dst: Env:0, delay_ms: 1}}]", ["pairs.0.src", "Arm:0"]),
        (f"{LINKS}crossdc_pairs=[{{src: Env:x, dst: Env:0, delay_ms: 1}}]", ["pairs.0.src", "Env:0-3"]),
        (f"{LINKS}crossdc_pairs=[{{src: Env:2-1, dst: Env:0, delay_ms: 1}}]", ["Env:2-1", "backwards"]),
        (f"{LINKS}crossdc_pairs=[{{src: [], dst: Env:0, delay_ms: 1}}]", ["pairs.0.src", "a list"]),
        (f"{LINKS}crossdc_pairs=[{{src: Env:1, dst: Env:0, delay_ms: -1}}]", ["0.delay_ms", "-1"]),
        (f"{LINKS}crossdc_pairs=[{{src: Env:1, dst: Env:0, delay: 1}}]", ["pairs.0", "delay_ms"]),
        (f"{LINKS}bandwidth_groups=[{{members: Env:0, bandwidth_mbps: 0}}]", ["0.bandwidth_mbps", "0"]),
        (
            f"{LINKS}bandwidth_groups=[{{members: [Env:0, Env:0-3], bandwidth_mbps: 1}}]",
            ["net_emulation", "Env:0-3", "twice"],
        ),
        (
            "cluster.net_emulation={enabled: true, "
            "crossdc_pairs: [{src: Env:8, dst: Rollout:0, delay_ms: 1}]}",
            ["Env:8", "only 8 env workers"],
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(
    override: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        config.load(None, [override])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("override", ["rollout", "=3", "a..b=3", "runner.x: 3"])
def test_an_override_that_is_none_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        config.load(None, [override])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runner: [", "not valid YAML"),
        ("runner:\n\tmax_epochs: 3", r"not valid YAML: (?s:.*)in line 2, column 1"),
        ("- a\n- b\n", "sections"),
        ("rollout: {max_batch_rows: 1}\nrollout: {max_batch_rows: 2}\n", "given twice"),
        ("x: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        config.load(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file.*nowhere\.yaml"):
        config.load(tmp_path / "nowhere.yaml")


def test_envs_are_shared_out_in_full_and_in_order() -> None:
    loaded = config.load(
        None,
        ["cluster.component_placement.env=0-2", "env.eval.total_num_envs=8", "env.pipeline_stages=2"],
    )
    counts = [loaded.envs_of("eval", rank) for rank in range(3)]
    assert counts == [3, 3, 2]
    assert [loaded.first_env_of("eval", rank) for rank in range(3)] == [0, 3, 6]
    assert [loaded.stage_sizes("eval", rank) for rank in range(3)] == [[2, 1], [2, 1], [1, 1]]


def test_without_a_number_each_worker_and_stage_gets_one_env() -> None:
    loaded = config.load(None, ["cluster.component_placement.env=0-4", "env.pipeline_stages=2"])
    assert loaded.total_envs("eval") == 10


def test_a_batch_holds_no_more_rows_than_the_largest_static_size() -> None:
    sizes = "rollout.static_batch_sizes=[1,8]"
    assert config.load(None, []).rollout.most_rows == 0
    assert config.load(None, [sizes]).rollout.most_rows == 8
    assert config.load(None, [sizes, "rollout.max_batch_rows=6"]).rollout.most_rows == 6


def test_one_client_may_fill_a_quarter_of_the_queue_unless_told_otherwise() -> None:
    assert config.load(None, ["broker.max_queue_mb=100"]).broker.max_client_bytes == 25 << 20
    both = config.load(None, ["broker.max_queue_mb=100", "broker.max_client_mb=60"])
    assert both.broker.max_client_bytes == 60 << 20
