"""The learning curve of a run: what is read, and what the picture shows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from zmqrl.telemetry.curve import draw, part_of, read
from zmqrl.telemetry.metrics import Metrics

BLUE, ORANGE = (0, 114, 178), (230, 159, 0)


def pixels(path: Path) -> npt.NDArray[np.int64]:
    with Image.open(path) as image:
        assert image.size == (1000, 700)
        return np.asarray(image.convert("RGB"), dtype=np.int64)


def places(picture: npt.NDArray[np.int64], colour: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    """Rows and columns of the pixels of about this colour, without the legend and the title."""
    near = (np.abs(picture - colour).sum(axis=-1) < 12)[50:]
    return np.argwhere(near)


def evaluation(steps: int, success: float | None, total: float | None = None) -> Metrics:
    return {
        "env_steps": steps,
        "wall_s": steps / 10,
        "eval/num_trajectories": 20,
        "eval/success_once": success,
        "eval/return": total,
    }


def test_success_and_return_have_a_panel_each(tmp_path: Path) -> None:
    path = tmp_path / "learning_curve.png"
    draw([evaluation(1000 * i, i / 10, -50.0 + 5 * i) for i in range(11)], path, "SAC")
    rows = places(pixels(path), BLUE)[:, 0]
    assert rows.min() < 200
    assert rows.max() > 400
    assert np.diff(np.unique(rows)).max() > 20, "a gap between the panels"


def test_without_success_the_return_has_the_picture_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    draw([evaluation(1000 * i, None, 1.0 * i) for i in range(11)], path, "SAC")
    assert np.diff(np.unique(places(pixels(path), BLUE)[:, 0])).max() == 1


def test_training_is_drawn_behind_the_evaluations(tmp_path: Path) -> None:
    def faint(records: list[Metrics]) -> int:
        draw(records, tmp_path / "curve.png", "SAC")
        picture = pixels(tmp_path / "curve.png")[50:]
        blended = np.abs(picture - (244, 212, 140)).sum(axis=-1) < 30
        return int(blended.sum())

    evaluations = [evaluation(1000 * i, i / 10) for i in range(11)]
    training: list[Metrics] = [
        {"env_steps": 100 * i, "env/success_once": (i % 7) / 10} for i in range(100)
    ]
    assert faint(evaluations) == 0
    assert faint(training + evaluations) > 500


def test_one_evaluation_is_a_point(tmp_path: Path) -> None:
    draw([evaluation(5000, 0.5)], tmp_path / "curve.png", "SAC")
    assert 10 < len(places(pixels(tmp_path / "curve.png"), BLUE)) < 200


def test_a_run_without_an_evaluation_still_has_a_picture(tmp_path: Path) -> None:
    def ink(records: list[Metrics]) -> int:
        draw(records, tmp_path / "curve.png", "SAC")
        return int((pixels(tmp_path / "curve.png")[:80] < 120).sum())

    titled = ink([evaluation(5000, 0.5)])
    assert ink([]) > titled / 2, "it says that there is none"
    assert ink([{"env_steps": 10, "env/return": 1.0}, {"env_steps": 20, "env/return": 2.0}]) > 0


def test_what_is_not_a_number_is_left_out(tmp_path: Path) -> None:
    records = [
        evaluation(0, 0.0),
        evaluation(1000, math.nan),
        evaluation(2000, None),
        {"env_steps": None},
    ]
    draw([*records, evaluation(3000, 1.0)], tmp_path / "curve.png", "SAC")
    assert len(places(pixels(tmp_path / "curve.png"), BLUE)) > 100


def test_what_a_resumed_run_has_overtaken_is_left_out(tmp_path: Path) -> None:
    lost: list[Metrics] = [{"env_steps": 1000 * i, "env/return": -100.0} for i in range(5, 10)]
    before: list[Metrics] = [{"env_steps": 1000 * i, "env/return": 1.0 * i} for i in range(5)]
    after: list[Metrics] = [{"env_steps": 1000 * i - 500, "env/return": 1.0 * i} for i in range(5, 12)]
    draw([*before, *lost, *after], tmp_path / "resumed.png", "SAC")
    draw([*before, *after], tmp_path / "straight.png", "SAC")
    assert (pixels(tmp_path / "resumed.png") == pixels(tmp_path / "straight.png")).all()


def test_an_evaluation_that_ends_late_removes_no_training(tmp_path: Path) -> None:
    training: list[Metrics] = [{"env_steps": 1000 * i, "env/return": 1.0 * i} for i in range(10)]
    draw([*training, evaluation(4000, None, 4.0)], tmp_path / "late.png", "SAC")
    draw([*training[:5], evaluation(4000, None, 4.0), *training[5:]], tmp_path / "early.png", "SAC")
    late, early = pixels(tmp_path / "late.png")[80:], pixels(tmp_path / "early.png")[80:]
    assert (late == early).all()


def test_a_title_is_never_taken_for_a_formula(tmp_path: Path) -> None:
    draw([], tmp_path / "curve.png", "lr $\\undefined{ " + "x" * 300)
    assert (pixels(tmp_path / "curve.png") < 120).any()


def test_nothing_but_the_picture_is_left_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "curve.png").write_bytes(b"the last one")
    draw([evaluation(1, 0.5)], tmp_path / "curve.png", "SAC")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


def test_a_cut_last_line_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = (
        json.dumps({"env_steps": 1})
        + "\n"
        + json.dumps({"env_steps": 2, "name": "π"}, ensure_ascii=False)
    )
    path.write_bytes(text.encode()[:-3])  # in the middle of a character
    assert read(path) == [{"env_steps": 1}]


def test_a_part_of_each_record_is_enough_for_the_picture(tmp_path: Path) -> None:
    records: list[Metrics] = [evaluation(1000 * i, i / 10, -50.0 + 5 * i) for i in range(11)]
    for step in range(0, 10_000, 500):
        train = {"env/return": step / 100, "env/success_once": 0.5, "train/loss": 1.0, "wall_s": step}
        records.append({"env_steps": step, **train})
    draw(records, tmp_path / "whole.png", "SAC")
    draw([part_of(record) for record in records], tmp_path / "part.png", "SAC")
    assert (tmp_path / "whole.png").read_bytes() == (tmp_path / "part.png").read_bytes()
    assert len(part_of(records[-1])) == 4
