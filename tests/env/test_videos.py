"""Films of evaluations, of whatever renders."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from conftest import TESTS, Pool
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from odd_sims import Painter

from zmqrl import config
from zmqrl.config import EnvConfig, EnvModeConfig
from zmqrl.env.adapters import ShardEnv
from zmqrl.env.making import make_shard
from zmqrl.env.worker import EnvWorker
from zmqrl.process import StopSignal

SIMS = TESTS / "odd_sims.py"
NO_MOVE = np.array([0, 0])


def painters(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv(
        [lambda: Painter(render_mode="rgb_array")] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP
    )


def frames_of(film: Path, *size: int) -> np.ndarray:
    """Its pictures, `[frames, height, width, 3]`."""
    words = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", film, "-f", "rawvideo"]
    done = subprocess.run([*words, "-pix_fmt", "rgb24", "-"], capture_output=True, check=True)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, *size, 3)


def film_of(shard: ShardEnv, path: Path, *size: int, steps: int = 25) -> np.ndarray:
    assert shard.film is not None
    shard.reset()
    shard.film.next = path
    shard.reset()
    for _ in range(steps):
        shard.step(NO_MOVE)
    shard.close()
    return frames_of(path, *size)


def red(frame: np.ndarray) -> int:
    """Columns that are red."""
    return int((frame[32, :, 0] > 120).sum())


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("autoreset_mode", ["disabled", "next_step", "same_step"])
def test_the_first_episode_of_the_first_env_is_filmed(
    folder: Path, vectorization: str, autoreset_mode: str
) -> None:
    section = EnvConfig(
        factory=f"{SIMS}:Painter",
        kwargs={"render_mode": "rgb_array"},
        vectorization=vectorization,  # type: ignore[arg-type]
        autoreset_mode=autoreset_mode,  # type: ignore[arg-type]
        eval=EnvModeConfig(save_video=True),
    )
    shard = make_shard(section, "eval", 2, lambda row: None, filmed=True)
    frames = film_of(shard, folder / "videos" / "one.mp4", 64, 96)
    # In same_step, the end is gone before anyone can look at it.
    count = 10 if autoreset_mode == "same_step" else 11
    assert frames.shape == (count, 64, 96, 3)
    widths = [red(frame) for frame in frames]
    assert np.allclose(widths, 9.6 * np.arange(count), atol=4)
    assert [path.name for path in (folder / "videos").iterdir()] == ["one.mp4"]


def test_a_ready_vector_env_is_filmed_through_its_own_render(folder: Path) -> None:
    frames = film_of(ShardEnv(painters(2)), folder / "ready.mp4", 64, 96)
    assert len(frames) == 10
    assert red(frames[9]) > red(frames[1])


class Tensors(VectorEnv[Any, Any, Any]):
    """A batch whose pictures are one tensor, as those of simulators on a GPU are."""

    num_envs = 2
    render_mode = "rgb_array"
    single_observation_space = spaces.Box(-1, 1, (1,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, pictures: Any) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.pictures = pictures

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions: Any) -> Any:
        no = np.zeros(2, bool)
        return np.zeros((2, 1), np.float32), np.zeros(2), ~no, no, {}

    def render(self) -> Any:
        return self.pictures


@pytest.mark.parametrize(
    "pictures",
    [
        torch.full((2, 32, 32, 3), 200, dtype=torch.uint8),
        torch.full((32, 32, 3), 200, dtype=torch.uint8),
        [np.full((32, 32, 4), 200, np.uint8)] * 2,
    ],
)
def test_pictures_may_be_a_batch_or_one(folder: Path, pictures: Any) -> None:
    frames = film_of(ShardEnv(Tensors(pictures)), folder / "one.mp4", 32, 32, steps=1)
    assert frames.shape == (2, 32, 32, 3)
    assert abs(float(frames.mean()) - 200) < 5


@pytest.mark.parametrize(
    ("pictures", "words"),
    [
        (None, r"render\(\) gave no picture"),
        (np.zeros((2, 8, 8, 3)), r"render\(\) gave float64 \[8, 8, 3\], not a picture"),
    ],
)
def test_what_is_no_picture_costs_the_film_and_nothing_else(
    folder: Path, pictures: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    shard = ShardEnv(Tensors(pictures))
    assert shard.film is not None
    shard.film.next = folder / "none.mp4"
    shard.reset()
    assert shard.step(NO_MOVE).terminated.all()
    (record,) = caplog.records
    assert re.search(f"no video: ValueError: {words}", record.getMessage())
    assert not list(folder.iterdir())


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_env_that_fails_to_render_goes_on(pool: Pool, vectorization: str) -> None:
    pool.start(policy="Balance")
    worker = video_worker(pool, vectorization, "env.kwargs.broken=true")
    assert worker.run()
    assert len(worker.reporter.episodes) == 2


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_env_worker_films_its_evaluation(pool: Pool, vectorization: str) -> None:
    pool.start(policy="Balance")
    worker = video_worker(pool, vectorization)
    assert worker.run()
    (film,) = pool.folder.rglob("*.mp4")
    assert film.name == "evaluation.mp4"
    assert len(frames_of(film, 64, 96)) == 11


def test_without_save_video_nothing_is_filmed(pool: Pool) -> None:
    pool.start(policy="Balance")
    assert video_worker(pool, "sync", "env.eval.save_video=false").run()
    assert not list(pool.folder.rglob("*.mp4"))


def video_worker(pool: Pool, vectorization: str, *overrides: str) -> EnvWorker:
    loaded = config.load(
        None,
        [
            *pool.overrides,
            f"runner.logger.log_path={pool.folder}",
            "cluster.component_placement.env=0-0",
            f"env.factory={SIMS}:Painter",
            "env.kwargs.render_mode=rgb_array",
            f"env.vectorization={vectorization}",
            "env.eval={total_num_envs: 2, save_video: true}",
            *overrides,
        ],
    )
    return EnvWorker(loaded, "eval", 0, StopSignal())
