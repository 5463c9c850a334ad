"""How a client that records finds out when a vector env begins the next episode."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import pytest
from gymnasium.spaces import Discrete

from zmqrl import PolicyClient
from zmqrl.recording.recorder import _autoreset_of


class Vector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Of a Gymnasium that has no word for it yet."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    single_action_space = Discrete(2)


class Foreign:
    """Of a library that zmqrl does not know."""

    single_action_space = Discrete(2)


class Isaac(Foreign):
    """As the simulators of Isaac Lab."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    episode_length_buf = 0


@pytest.mark.parametrize(("version", "mode"), [("0.29.1", "same_step"), ("1.0.0", "next_step")])
def test_a_gymnasium_without_a_word_for_it_is_known_by_its_version(
    version: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gymnasium, "__version__", version)
    assert _autoreset_of(Vector()) == mode


def test_what_a_vector_env_tells_counts() -> None:
    for mode in ("SameStep", "NextStep", "Disabled"):
        envs = gymnasium.make_vec("CartPole-v1", 2, "sync", vector_kwargs={"autoreset_mode": mode})
        assert _autoreset_of(envs).replace("_", "") == mode.lower()
        envs.close()
    told = Foreign()
    told.metadata = {"autoreset_mode": "disabled"}  # type: ignore[attr-defined]
    assert _autoreset_of(told) == "disabled"


def test_simulators_as_those_of_isaac_lab_reset_in_the_same_step() -> None:
    assert _autoreset_of(Isaac()) == "same_step"


def test_where_it_cannot_be_known_it_is_asked_for(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"Foreign does not tell .*metadata = \{'autoreset_mode'"):
        PolicyClient(f"ipc://{folder}/broker", learner=f"ipc://{folder}/learner", envs=Foreign())
