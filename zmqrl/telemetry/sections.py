"""What the table of a training run shows: which metrics, in which section, under which label."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from zmqrl.telemetry.metrics import Metrics


class Unit(Enum):
    """How a value is written."""

    NUMBER = auto()
    """Integers as counts, others with four significant digits."""
    COUNT = auto()
    """A whole number, even if it is reported as a float."""
    SETTING = auto()
    """A number that a person chose, such as a learning rate: without further zeros."""
    SHARE = auto()
    SECONDS = auto()


@dataclass(slots=True)
class Row:
    """One metric, ready to be shown."""

    label: str
    value: str
    weight: int
    """From 0, what one looks at first, to 2, what is left out first where there is little room."""


@dataclass(slots=True)
class Section:
    """Rows under a title."""

    title: str
    rows: list[Row] = field(default_factory=list)


_TITLES = ("Time", "Environment", "Rollout", "Evaluation", "Replay Buffer", "Training")

_GROUPS = {
    "time/": "Time",
    "env/": "Environment",
    "trajectories_": "Environment",
    "rollout/": "Rollout",
    "broker/": "Rollout",
    "eval/": "Evaluation",
    "train/replay_buffer/": "Replay Buffer",  # before train/, which it also begins with
    "train/sac/": "Training",
    "train/ppo/": "Training",
    "train/": "Training",
    "global_step": "Training",
    "learner_updates": "Training",
    "achieved_updates_per_env_step": "Training",
}
"""What a metric's name begins with, and its section; the first that fits counts."""

_EPISODES = {
    "success_once": ("success", Unit.SHARE, 0),
    "success_at_end": ("success at end", Unit.SHARE, 1),
    "fail_once": ("failed", Unit.SHARE, 2),
    "return": ("return", Unit.NUMBER, 0),
    "episode_len": ("episode length", Unit.NUMBER, 1),
    "reward": ("reward/step", Unit.NUMBER, 2),
    "num_trajectories": ("episodes", Unit.COUNT, 1),
}

_KNOWN = {
    "time/step": ("global step", Unit.SECONDS, 0),
    "time/env/step": ("env: step", Unit.SECONDS, 0),
    "time/env/step_p50": ("env: step, p50", Unit.SECONDS, 2),
    "time/env/step_p99": ("env: step, p99", Unit.SECONDS, 2),
    "time/env/reset": ("env: reset", Unit.SECONDS, 2),
    "time/env/reset_p50": ("env: reset, p50", Unit.SECONDS, 2),
    "time/env/reset_p99": ("env: reset, p99", Unit.SECONDS, 2),
    "time/env/wait": ("env: wait", Unit.SECONDS, 0),
    "time/env/gate_wait": ("env: held back", Unit.SECONDS, 1),
    "time/broker/queue": ("broker: queue", Unit.SECONDS, 1),
    "time/rollout/predict": ("rollout: predict", Unit.SECONDS, 0),
    "time/rollout/weights": ("rollout: weights", Unit.SECONDS, 2),
    "time/actor/update": ("actor: update", Unit.SECONDS, 0),
    "time/actor/gate_wait": ("actor: held back", Unit.SECONDS, 1),
    "time/actor/publish": ("actor: publish", Unit.SECONDS, 2),
    "time/actor/update_total": ("actor: all updates", Unit.SECONDS, 2),
    "time/actor/gate_wait_total": ("actor: all held back", Unit.SECONDS, 2),
    "time/actor/checkpoint": ("actor: save", Unit.SECONDS, 2),
    "time/eval": ("evaluation", Unit.SECONDS, 1),
    **{f"env/{name}": shown for name, shown in _EPISODES.items()},
    "trajectories_sent": ("sent trajectories", Unit.COUNT, 2),
    "trajectories_received": ("received trajectories", Unit.COUNT, 1),
    "trajectories_dropped": ("dropped trajectories", Unit.COUNT, 1),
    "trajectories_rolled_back": ("rolled back", Unit.COUNT, 2),
    "trajectories_duplicate": ("duplicate trajectories", Unit.COUNT, 2),
    "env/time/average_delay": ("mean delay", Unit.SECONDS, 1),
    "env/time/median_delay": ("median delay", Unit.SECONDS, 2),
    "env/time/max_delay": ("longest delay", Unit.SECONDS, 2),
    "env/time/min_delay": ("shortest delay", Unit.SECONDS, 2),
    "rollout/busy": ("busy", Unit.SHARE, 0),
    "rollout/mean_shards_per_batch": ("requests/batch", Unit.NUMBER, 0),
    "rollout/mean_rows_per_batch": ("observations/batch", Unit.NUMBER, 1),
    "rollout/policy_version": ("policy version", Unit.COUNT, 1),
    "rollout/weights_loaded": ("weights loaded", Unit.COUNT, 2),
    "rollout/weights_failed": ("weights failed", Unit.COUNT, 1),
    "broker/requests": ("requests", Unit.COUNT, 1),
    "broker/answered": ("answered", Unit.COUNT, 2),
    "broker/errors": ("errors", Unit.COUNT, 1),
    "broker/requeued": ("run again", Unit.COUNT, 1),
    "broker/dropped": ("undelivered", Unit.COUNT, 2),
    "eval/number": ("evaluation", Unit.COUNT, 2),
    **{f"eval/{name}": shown for name, shown in _EPISODES.items()},
    "eval/policy_version": ("policy version", Unit.COUNT, 1),
    "eval/env_steps": ("at env step", Unit.COUNT, 1),
    "eval/missing_trajectories": ("missing", Unit.COUNT, 2),
    "train/replay_buffer/num_trajectories": ("trajectories", Unit.COUNT, 1),
    "train/replay_buffer/total_samples": ("samples", Unit.COUNT, 0),
    "train/replay_buffer/cache_size": ("cache size", Unit.COUNT, 2),
    "global_step": ("global step", Unit.COUNT, 1),
    "learner_updates": ("updates", Unit.COUNT, 0),
    "achieved_updates_per_env_step": ("updates/env step", Unit.NUMBER, 1),
    "train/sac/critic_loss": ("critic loss", Unit.NUMBER, 0),
    "train/sac/actor_loss": ("actor loss", Unit.NUMBER, 0),
    "train/sac/alpha_loss": ("alpha loss", Unit.NUMBER, 2),
    "train/sac/alpha": ("alpha", Unit.NUMBER, 0),
    "train/critic/q_data": ("Q of the data", Unit.NUMBER, 1),
    "train/actor/q_pi": ("Q of the policy", Unit.NUMBER, 1),
    "train/actor/entropy": ("entropy", Unit.NUMBER, 1),
    "train/critic/grad_norm": ("critic grad norm", Unit.NUMBER, 2),
    "train/actor/grad_norm": ("actor grad norm", Unit.NUMBER, 2),
    "train/critic/lr": ("critic lr", Unit.SETTING, 2),
    "train/actor/lr": ("actor lr", Unit.SETTING, 2),
    "train/staleness/mean": ("mean staleness", Unit.NUMBER, 1),
    "train/staleness/max": ("max staleness", Unit.COUNT, 2),
    "train/staleness/dropped": ("dropped as stale", Unit.COUNT, 2),
}
"""Label, unit and weight, in the order in which they are shown; further metrics come after them."""


_EACH = "train/share/"
_SHARES = (_EACH, "train/share_min", "train/share_max")

_UNEVEN = 2.0
"""Times the smallest share of an env worker: if the largest is more, those of all are shown."""


def sections(metrics: Metrics) -> list[Section]:
    """The sections that have something to show, in their order.

    A metric that has a known beginning but is not known itself, such as `train/my/loss`, is shown under
    a label made from its name. One that is None is not shown.
    """
    found = {title: Section(title) for title in _TITLES}
    unknown = [name for name in metrics if name not in _KNOWN]
    for name in [*_KNOWN, *unknown]:
        value = metrics.get(name)
        group = next((group for group in _GROUPS if name.startswith(group)), None)
        if value is not None and group is not None and not name.startswith(_SHARES):
            found[_GROUPS[group]].rows.append(_row(name, value, group))
    found["Environment"].rows += _shares(metrics)
    return [section for section in found.values() if section.rows]


def _row(name: str, value: float | int | str, group: str) -> Row:
    if name in _KNOWN:
        label, unit, weight = _KNOWN[name]
    else:
        own = name.removeprefix(group)
        label = own.replace("/", ": " if group == "time/" else " ").replace("_", " ")
        unit, weight = Unit.SECONDS if group == "time/" else Unit.NUMBER, 1
    return Row(label, written(value, unit), weight)


def _shares(metrics: Metrics) -> list[Row]:
    """How much of the training data each env worker has made: the extremes, and all if they differ much.

    Of one env worker alone there is nothing to say.
    """
    shares = {name.removeprefix(_EACH): metrics[name] for name in metrics if name.startswith(_EACH)}
    least, most = metrics.get("train/share_min"), metrics.get("train/share_max")
    if len(shares) < 2 or not isinstance(least, float) or not isinstance(most, float):
        return []
    rows = []
    for label, extreme in (("min share", least), ("max share", most)):
        whose = next((f": {name}" for name, share in shares.items() if share == extreme), "")
        rows.append(Row(label + whose, written(extreme, Unit.SHARE), 1))
    if most > _UNEVEN * least:
        for name, share in shares.items():
            if share is not None:
                rows.append(Row(f"share of {name}", written(share, Unit.SHARE), 2))
    return rows


def written(value: float | int | str, unit: Unit = Unit.NUMBER) -> str:
    """A value as a person reads it, in about nine characters.

    >>> written(1234567), written(0.01234, Unit.SECONDS), written(0.5, Unit.SHARE), written(1.5)
    ('1,234,567', '12.3 ms', '50.0%', '1.500')
    """
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return f"{float(value)}"
    if unit is Unit.SECONDS:
        return seconds(value)
    if unit is Unit.SHARE:
        return f"{value:.1%}"
    if unit is Unit.SETTING:
        return f"{value:.4g}"
    return count(value) if unit is Unit.COUNT or isinstance(value, int) else _number(value)


def count(value: float) -> str:
    """A whole number: with separators, and from ten million on with a letter for the magnitude.

    >>> count(1234567), count(12345678)
    ('1,234,567', '12.35M')
    """
    if abs(value) < 1e7:
        return f"{value:,.0f}"
    for magnitude, letter in ((1e6, "M"), (1e9, "G")):
        if abs(value) < 1000 * magnitude:
            return f"{value / magnitude:#.4g}{letter}"
    return f"{value:.2e}"


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 999.95:
        return f"{value:#.4g}"
    return count(value) if 1e-3 <= abs(value) < 1e12 else f"{value:.2e}"


def seconds(value: float) -> str:
    """A time with three significant digits, in the unit that suits it.

    >>> seconds(0.0000123), seconds(1.5), seconds(125), seconds(3725)
    ('12.3 µs', '1.50 s', '2m 05s', '1h 02m')
    """
    if value == 0:
        return "0 s"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (60.0, 1.0, "s")):
        if abs(value) < limit * 0.9995:  # what rounds to the limit is of the next unit
            return f"{value * factor:#.3g}".rstrip(".") + f" {unit}"
    return duration(value)


def duration(value: float) -> str:
    """Whole seconds, minutes and seconds, hours and minutes, or days and hours."""
    whole = round(value)
    for unit, name, smaller, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name} {whole % unit // smaller:02d}{small}"
    return f"{whole}s"
