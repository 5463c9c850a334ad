"""What learns in the drills: it checks every trajectory, and its weights are their version's number."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from zmqrl.learner.algorithm import Update
from zmqrl.trajectory import Trajectory

if __package__:
    from faults.policies import is_answer_to
else:  # it was named by its path, as `algorithm.factory` does
    from policies import is_answer_to


class Trajectories:
    """Those that have arrived, and what is wrong with them."""

    def __init__(self) -> None:
        self.count = 0
        self.crossed = 0
        """Of which an action answers another observation, or was made by other weights than is said."""
        self._first: list[list[int]] = []  # of each: the tag of its first observation, which is unique

    def add(self, trajectory: Trajectory) -> None:
        """Check and count one."""
        self.count += 1
        actions, weights = trajectory.policy["actions"], trajectory.policy["weights"]
        answer = {"actions": actions, "values": trajectory.policy["values"]}
        told = (weights == trajectory.versions[:, None]).all()
        self.crossed += not (told and is_answer_to(trajectory.observation, answer))
        self._first.append(trajectory.observation["tag"][0, 0, :2].tolist())

    @property
    def duplicated(self) -> int:
        """Those that were taken more than once."""
        return len(self._first) - len(set(map(tuple, self._first)))

    def plain(self) -> dict[str, Any]:
        """As what JSON takes, and a checkpoint."""
        return {"count": self.count, "crossed": self.crossed, "first": self._first}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Trajectories:
        """What `plain` gave."""
        trajectories = cls()
        trajectories.count, trajectories.crossed = plain["count"], plain["crossed"]
        trajectories._first = [list(tag) for tag in plain["first"]]
        return trajectories


class Checks:
    """An algorithm that learns nothing: each update is a global step, and a new version.

    What a checkpoint holds of it is written to a file as well, for the drill to read.

    Args:
        spaces: Of the simulators.
        config: The whole configuration.
        folder: Where that file is.
    """

    on_policy = False

    def __init__(self, spaces: Any, config: Any, folder: str) -> None:
        self.actor = _Number()
        self._file = Path(folder) / FILE
        self._trajectories = Trajectories()

    def add(self, trajectory: Trajectory) -> None:
        self._trajectories.add(trajectory)

    def update(self, progress: float) -> Update | None:
        if not self._trajectories.count:
            return None
        time.sleep(0.01)
        self.actor.number += 1
        return Update(ends_step=True)

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        state = self._trajectories.plain()
        self._file.write_text(json.dumps(state), encoding="utf-8")
        return {**state, "number": self.actor.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # A learner that goes on publishes what it has under the next version.
        self.actor.number = state["number"] + 1
        self._trajectories = Trajectories.of(state)


FILE = "trajectories.json"


class _Number:
    """Stands where a learner has its network; the rollout workers have a policy of their own."""

    number = 1

    def state_dict(self) -> dict[str, Any]:
        import torch  # not with this file: the drills need it nowhere else

        return {"number": torch.tensor([self.number])}
