"""What a person sees of a training run, on terminals of several sizes and in a log file."""

from __future__ import annotations

import io
import logging
import math
import re
import sys
import threading
import time

import pytest
from rich.console import Console

from zmqrl.telemetry.metrics import Metrics
from zmqrl.telemetry.sections import Unit, sections, written
from zmqrl.telemetry.training_view import TrainingView

TITLES = ["Time", "Environment", "Rollout", "Evaluation", "Replay Buffer", "Training"]

METRICS: Metrics = {
    "env_steps": 1234567,
    "env_steps_per_s": 3210.4,
    "learner_updates": 4321,
    "policy_version": 42,
    "rollout/policy_version": 40,
    "bottleneck": "rollout",
    "time/step": 0.0123,
    "time/env/step": 0.00345,
    "env/return": -12.345,
    "rollout/busy": 0.875,
    "eval/number": 3,
    "eval/policy_version": 30,
    "eval/env_steps": 900000,
    "eval/num_trajectories": 20,
    "eval/success_once": 0.95,
    "eval/return": -2.5,
    "train/replay_buffer/total_samples": 500000,
    "train/sac/critic_loss": 0.25,
}
MANY: Metrics = {
    **METRICS,
    **{
        f"{group}/other_{i}": i + 0.5
        for group in ("time", "env", "rollout", "eval", "train")
        for i in range(20)
    },
}


class Screen:
    """A terminal: takes what is written and has rows of characters, the last `height` of them seen."""

    _CONTROL = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]")

    def __init__(self, width: int, height: int) -> None:
        self.file = io.StringIO()
        self.console = Console(
            width=width, height=height, force_terminal=True, file=self.file, _environ={"TERM": "xterm"}
        )
        self.width, self.height = width, height

    def rows(self) -> list[str]:
        """All rows from the start, also those that have left the window at its top."""
        rows, row, column = [""], 0, 0
        for token in self._CONTROL.findall(self.file.getvalue()):
            if token == "\n":
                row, column = row + 1, 0
            elif token == "\r":
                column = 0
            elif token.startswith("\x1b"):
                count = int(re.sub(r"\D", "", token) or 1)
                if token.endswith("A"):
                    row -= count
                    assert row >= max(0, len(rows) - self.height), "up past the top of the window"
                elif token.endswith("K"):
                    rows[row] = ""
            else:
                if column == self.width:
                    row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
                rows[row] = rows[row].ljust(column)[:column] + token + rows[row][column + 1 :]
                column += 1
            rows += [""] * (row + 1 - len(rows))
        return [line.rstrip() for line in rows]

    def text(self) -> str:
        """What is in the window."""
        return "\n".join(self.rows()[-self.height :])


@pytest.fixture(autouse=True)
def _each_update_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqrl.telemetry.training_view._EVERY", 0.0)


def shown(
    metrics: Metrics, width: int = 80, height: int = 24, progress: float | None = 0.42
) -> tuple[Screen, TrainingView]:
    screen = Screen(width, height)
    view = TrainingView(screen.console, "SAC on FetchReach")
    view.update(metrics, progress, None if progress is None else 754.0)
    return screen, view


def plain() -> tuple[io.StringIO, Console]:
    file = io.StringIO()
    return file, Console(file=file, width=80)


def test_the_header_says_in_words_where_the_run_is() -> None:
    screen, view = shown(METRICS)
    text = screen.text()
    view.close()
    for words in (
        "SAC on FetchReach",
        "42%",
        "ETA 12m 34s",
        "elapsed",
        "1,234,567 env steps",
        "3,210 steps/s",
        "version 42, lag 2",
        "limited by rollout workers",
    ):
        assert words in text


def test_a_run_without_an_end_has_no_bar_and_no_eta() -> None:
    screen, view = shown(METRICS, progress=None)
    text = screen.text()
    view.close()
    assert "elapsed" in text
    assert "ETA" not in text
    assert "%" not in text.splitlines()[0]
    assert "━" not in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 50)])
def test_all_sections_are_seen_at_once_in_their_order(width: int, height: int) -> None:
    screen, view = shown(MANY, width, height)
    text = screen.text()
    view.close()
    for title in TITLES:
        assert re.search(rf"(^|  ){title}( \+\d+)?( |$)", text, re.MULTILINE), title
    by_column = sorted(
        (re.search(rf"(?m)^(.*  )?{title}( \+\d+)?(  |$)", text) for title in TITLES),
        key=lambda found: (len(found[1] or ""), found.start()),  # type: ignore[index,union-attr]
    )
    assert [re.sub(r".*  |[ +\d]*$", "", found[0].rstrip()) for found in by_column if found] == TITLES


def test_numbers_are_written_for_people() -> None:
    screen, view = shown(METRICS, 120, 40)
    text = screen.text()
    view.close()
    assert re.search(r"global step +12\.3 ms", text)
    assert re.search(r"success +95\.0%", text)
    assert re.search(r"busy +87\.5%", text)
    assert re.search(r"samples +500,000", text)
    assert re.search(r"critic loss +0\.2500", text)


def test_what_is_absent_or_none_is_not_shown() -> None:
    screen, view = shown({"env_steps": 5, "train/sac/alpha": 0.1, "env/return": None})
    text = screen.text()
    view.close()
    assert "alpha" in text
    assert not any(title in text for title in TITLES if title != "Training")
    assert "version" not in text


def test_a_metric_of_a_users_own_algorithm_is_in_the_training_section() -> None:
    (section,) = sections({"train/my/big_loss": 1.5, "unrelated/x": 1.0})
    assert section.title == "Training"
    assert [(row.label, row.value) for row in section.rows] == [("my big loss", "1.500")]


@pytest.mark.parametrize(
    ("shares", "rows"),
    [
        ({"env-0": 1.0}, {}),
        (
            {"env-0": 0.25, "env-1": 0.2, "env-2": 0.35, "env-3": 0.2},
            {"min share: env-1": "20.0%", "max share: env-2": "35.0%"},
        ),
        (
            {"env-0": 0.3, "env-1": 0.1, "env-2": 0.6},
            {
                "min share: env-1": "10.0%",
                "max share: env-2": "60.0%",
                "share of env-0": "30.0%",
                "share of env-1": "10.0%",
                "share of env-2": "60.0%",
            },
        ),
    ],
)
def test_the_share_of_each_env_worker_is_shown_where_they_differ_much(
    shares: dict[str, float], rows: dict[str, str]
) -> None:
    metrics = {f"train/share/{name}": share for name, share in shares.items()}
    extremes = {"train/share_min": min(shares.values()), "train/share_max": max(shares.values())}
    found = sections({**metrics, **extremes, "env/return": 1.0})
    assert [section.title for section in found] == ["Environment"]
    assert {row.label: row.value for row in found[0].rows[1:]} == rows


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, Unit.NUMBER, "0"),
        (12.0, Unit.COUNT, "12"),
        (999, Unit.NUMBER, "999"),
        (9_999_999, Unit.NUMBER, "9,999,999"),
        (12_345_678, Unit.NUMBER, "12.35M"),
        (1_234_567_890, Unit.NUMBER, "1.235G"),
        (0.0, Unit.NUMBER, "0"),
        (-0.5, Unit.NUMBER, "-0.5000"),
        (999.96, Unit.NUMBER, "1,000"),
        (12345.6, Unit.NUMBER, "12,346"),
        (0.00001234, Unit.NUMBER, "1.23e-05"),
        (1e300, Unit.NUMBER, "1.00e+300"),
        (math.nan, Unit.SHARE, "nan"),
        (-math.inf, Unit.SECONDS, "-inf"),
        (0.0003, Unit.SETTING, "0.0003"),
        (0.9996, Unit.SECONDS, "1.00 s"),
        (0.00012, Unit.SECONDS, "120 µs"),
        (75.0, Unit.SECONDS, "1m 15s"),
        (90061.0, Unit.SECONDS, "1d 01h"),
        ("warming up", Unit.NUMBER, "warming up"),
    ],
)
def test_values_have_few_digits(value: float | int | str, unit: Unit, text: str) -> None:
    assert written(value, unit) == text


@pytest.mark.parametrize(
    ("width", "height"), [(80, 24), (120, 40), (60, 10), (30, 5), (7, 3), (2, 2), (1, 1)]
)
def test_the_table_never_leaves_the_window(width: int, height: int) -> None:
    screen = Screen(width, height)
    view = TrainingView(screen.console, "SAC on FetchReach")
    for metrics in (METRICS, MANY, METRICS):
        view.update(metrics, 0.5, 1e9)
    pictures = len(screen.rows())  # also fails if the cursor goes up past the top
    view.close()
    assert pictures <= height


def test_where_room_is_short_the_important_rows_stay() -> None:
    screen, view = shown(MANY, 80, 14)
    text = screen.text()
    view.close()
    assert "critic loss" in text
    assert "busy" in text
    assert re.search(r"Training \+1\d", text), "how many are left out"


def test_pictures_are_made_at_most_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    screen = Screen(80, 24)
    view = TrainingView(screen.console, "SAC")
    began = time.monotonic()
    for step in range(100):
        view.update({"env_steps": step}, None, None)
    drawn = screen.file.getvalue().count("env steps")
    assert drawn <= 1 + 4 * (time.monotonic() - began)
    view.close()


def test_lines_of_processes_are_above_the_table_from_any_thread() -> None:
    screen, view = shown(METRICS)
    threads = [threading.Thread(target=view.say, args=(f"env-{i}", f"hello {i}")) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = screen.rows()
    view.close()
    table = next(index for index, row in enumerate(rows) if row.startswith("SAC on FetchReach"))
    assert sorted(rows[:table]) == [f"[env-{i}] hello {i}" for i in range(4)]
    assert sum(row.startswith("SAC on FetchReach") for row in rows) == 1


def test_the_log_of_this_process_does_not_tear_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(80, 24)
    monkeypatch.setattr(screen.file, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", screen.file)  # a terminal is both
    handler = logging.StreamHandler(screen.file)
    logging.getLogger().addHandler(handler)
    try:
        view = TrainingView(screen.console, "SAC")
        view.update({"env_steps": 5}, None, None)
        logging.getLogger("zmqrl.test").warning("something odd")
        rows = screen.rows()
        view.close()
    finally:
        logging.getLogger().removeHandler(handler)
    assert rows[0] == "something odd"
    assert sum(row.startswith("SAC") for row in rows) == 1
    assert handler.stream is screen.file


def test_at_the_end_the_last_table_stays_once_and_whole() -> None:
    screen, view = shown(MANY)
    view.update({"env_steps": 2000000}, 1.0, 0.0)
    view.close()
    view.close()
    rows = screen.rows()
    assert sum(row.startswith("SAC on FetchReach") for row in rows) == 1
    assert "2,000,000 env steps" in rows[1]
    assert sum("other" in row for row in rows) > 24, "although the window has fewer rows"
    assert not any("+1" in row for row in rows)


def test_after_the_end_lines_are_still_printed() -> None:
    screen, view = shown(METRICS)
    view.close()
    view.update({"env_steps": 1}, None, None)
    view.say("env-0", "late")
    assert "[env-0] late" in screen.rows()[-2]


def test_a_terminal_that_knows_only_ascii_gets_ascii() -> None:
    data = io.BytesIO()
    file = io.TextIOWrapper(data, encoding="ascii", write_through=True)
    console = Console(file=file, width=80, height=24, force_terminal=True, _environ={"TERM": "xterm"})
    view = TrainingView(console, "SAC μ")
    view.update({**METRICS, "time/env/wait": 0.00001}, 0.5, 5.0)
    view.close()
    assert b"===" in data.getvalue()
    assert b"10.0 us" in data.getvalue()


def test_wide_characters_do_not_shift_the_columns() -> None:
    screen, view = shown({"train/my/损失": 1.0, "train/my/loss": 2.0, "time/step": 1.0})
    view.close()
    from rich.cells import cell_len

    ends = {cell_len(row) for row in screen.rows() if " my " in row}
    assert len(ends) == 1


def test_a_file_gets_a_line_now_and_then_and_no_control_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqrl.telemetry.training_view._PLAIN_EVERY", 0.0)
    file, console = plain()
    view = TrainingView(console, "SAC")
    view.update(METRICS, 0.42, 10.0)
    assert file.getvalue().splitlines()[-1] == (
        "42%  1,234,567 env steps  3,210 steps/s  4,321 updates  version 42, lag 2  "
        "evaluation: success 95.0%, return -2.500  limited by rollout workers"
    )
    view.close()
    assert "\x1b" not in file.getvalue()


def test_between_two_lines_in_a_file_are_seconds() -> None:
    file, console = plain()
    view = TrainingView(console, "SAC")
    for step in range(100):
        view.update({"env_steps": step}, None, None)
    assert file.getvalue() == ""
    view.close()


@pytest.mark.parametrize(
    ("name", "words"), [("eval/number", "evaluation 2 of"), (None, "evaluation of")]
)
def test_each_evaluation_is_a_line_of_its_own_in_a_file(name: str | None, words: str) -> None:
    file, console = plain()
    view = TrainingView(console, "SAC")
    view.update({"env_steps": 5}, None, None)
    for number in (1, 1, 2):
        metrics: Metrics = {"eval/policy_version": 10 * number, "eval/num_trajectories": 20}
        metrics |= {"eval/return": 1.0 * number, "eval/env_steps": 5000}
        view.update(metrics | ({name: number} if name else {}), None, None)
    lines = file.getvalue().splitlines()
    view.close()
    assert len(lines) == 2
    assert lines[1] == f"{words} version 20 at 5,000 env steps: return 2.000, 20 episodes"


def test_what_the_metrics_say_is_never_taken_for_markup() -> None:
    file, console = plain()
    view = TrainingView(console, "SAC [bold]x[/nonsense]")
    view.say("env-0", "[/red] is what it said")
    view.update({"env_steps": 5, "bottleneck": "[/blue]"}, None, None)
    view.close()
    assert "[/red] is what it said" in file.getvalue()
    assert "[/blue]" in file.getvalue()
