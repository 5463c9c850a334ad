"""One shape for every simulator: a shard of `num_envs` rows that is reset and stepped.

Gymnasium has three ways to begin the next episode of a row, and a vector env names its own in
`metadata["autoreset_mode"]`:

* DISABLED (our default): the finished rows are reset here, at once, each with its own seed.
* NEXT_STEP: the vector env spends the row's next step on the reset. That step is no transition:
  its row is not `valid`.
* SAME_STEP: the vector env resets within the step, and hands the end of the episode over in its infos.

A `ShardEnv` hides the difference. In all three modes the valid rows are the same transitions, and no
simulator is stepped past its end.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import connection
from signal import Signals
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from zmqrl.env import chunks, wrappers
from zmqrl.env.actions import actions_for
from zmqrl.env.batched import BatchedEnv
from zmqrl.env.conversion import Tree, check_batchable
from zmqrl.env.envpool import PoolEnv
from zmqrl.env.film import Film
from zmqrl.env.observations import Observations
from zmqrl.errors import ConfigError, EnvironmentFailure, ZmqrlError, in_a_line
from zmqrl.transport.rows import on_cpu, one_per_row

SeedOf: TypeAlias = Callable[[int], "int | None"]
Rows: TypeAlias = npt.NDArray[np.bool_]
AnyVectorEnv: TypeAlias = "VectorEnv[Any, Any, Any]"

_TO_END = 5.0
"""Seconds that a process may take to end after it has closed its pipe."""


@dataclass(slots=True)
class Step:
    """What one step of a shard of N rows gave.

    Attributes:
        observation: Tree of `[N, ...]`: what to act on next. It owns its memory.
        reward: float64 `[N]`; of chunks of actions `[N, k]`, 0 in sub-steps after an episode's end.
        terminated: bool `[N]`.
        truncated: bool `[N]`.
        final_observation: Tree of `[N, ...]` whose finished rows hold the observation in which the
            episode ended; None when no row has finished.
        success: bool `[N]`, of the final step where a row has finished; None while the simulator has
            reported no success key.
        succeeded: The same, of any sub-step of a chunk; without chunks it is `success`.
        valid: bool `[N]`. False where the vector env spent the step on a reset: the row's action was
            not used, its reward is 0, and it is no transition. Of chunks `[N, k]`; False in sub-steps
            after an episode's end.
        reset: bool `[N]`: the rows of which `observation` begins an episode.
        step_seconds: Seconds in the simulator's step (with its resets, where it resets by itself).
        reset_seconds: Seconds in resets of finished rows; 0 when there were none.
        rows: int64 `[N]`: which rows of the shard the step is about. All of them, in order, unless the
            simulator answers in parts (`ShardEnv.rows`).
    """

    observation: Tree
    reward: npt.NDArray[np.float64]
    terminated: Rows
    truncated: Rows
    final_observation: Tree | None
    success: Rows | None
    succeeded: Rows | None
    valid: Rows
    reset: Rows
    step_seconds: float
    reset_seconds: float
    rows: npt.NDArray[np.int64]


class ShardEnv:
    """A batch of simulators that one env worker steps together.

    Example:
        >>> shard = ShardEnv(gymnasium.make_vec("CartPole-v1", num_envs=2))
        >>> observation = shard.reset()
        >>> shard.step(np.array([0, 1])).reward
        array([1., 1.])
        >>> shard.close()

    Attributes:
        num_envs: The number of rows, N.
        vector_env: The simulators.
        name: What errors call the simulator.
        single_action_space: The action space of one row.
        autoreset_mode: How the vector env begins the next episode of a row.
        seeds_every_episode: Whether the seeds decide where each episode begins. A vector env that
            resets by itself takes them in `reset` only; the rows of an EnvPool go on from theirs.
        answers_in_parts: Whether `reset` and `step` give the observations of some rows only.
        before_reset: Called before rows are reset here.
        goes_on: Asked between the sub-steps of a chunk; if it says no, the step ends there, as no
            transition.
        film: What films the first row; None if it does not render.
    """

    def __init__(
        self,
        vector_env: AnyVectorEnv,
        seed_of: SeedOf = lambda row: None,
        *,
        name: str | None = None,
        success_key: str | None = None,
        rescale_actions: bool = False,
        clip_actions: bool = False,
        info_keys: Sequence[str] = (),
        task_description: str | None = None,
        action_chunks: chunks.Chunks | None = None,
    ) -> None:
        """Wrap a ready vector env, which the shard then owns.

        Args:
            vector_env: Its `metadata["autoreset_mode"]` is heeded; NEXT_STEP when it is missing.
            seed_of: Called with the row each time one of its episodes is about to begin; the seed of
                that episode, or None to let the simulator go on. A vector env other than
                `SyncVectorEnv` and `AsyncVectorEnv` takes one int: the first of those seeds.
            name: What errors call the simulator.
            success_key: The key of infos that tells success; None for `success`, then `is_success`.
            rescale_actions: Map actions from [-1, 1] to the Box.
            clip_actions: Clip actions to the Box; else one outside is an error.
            info_keys: Infos that the observation gets.
            task_description: For every row, in the observation under `task_descriptions`.
            action_chunks: If the policy gives several actions at once.

        Raises:
            ConfigError: `rescale_actions` without a bounded Box.
            EnvironmentFailure: A space cannot be batched.
        """
        self.num_envs = vector_env.num_envs
        self.name = name or str(vector_env)
        self.single_action_space = vector_env.single_action_space
        self.autoreset_mode = AutoresetMode(
            vector_env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        )
        base = vector_env.unwrapped
        self._pool = base if isinstance(base, PoolEnv) else None
        self._at_once = self._pool.batch_size if self._pool else self.num_envs
        self.answers_in_parts = self._at_once < self.num_envs
        self.seeds_every_episode = (
            self.autoreset_mode is AutoresetMode.DISABLED or self._pool is not None
        )
        self.before_reset: Callable[[], None] = lambda: None
        self.goes_on: Callable[[], bool] = lambda: True
        self.vector_env = vector_env
        self._base: Any = base
        self._seed_of = seed_of
        self._success_keys = success_keys(success_key)
        self._reports_success = False
        self._rescale = rescale_actions
        self._clip = clip_actions
        observation_space: Any = getattr(vector_env, "single_observation_space", None)
        self._observations = Observations(
            self.name,
            observation_space,
            self._at_once,
            # What a vector env does not copy, it may overwrite in its next step or reset.
            copy=getattr(self._base, "copy", None) is not True,
            info_keys=info_keys,
            task=task_description,
            number_of=lambda place: int(self.rows[place]),
        )
        self.film: Film | None = None
        if getattr(vector_env, "render_mode", None) is not None:
            self.film = Film(vector_env.render, vector_env.metadata.get("render_fps"))
        self._resets_next = np.zeros(self.num_envs, np.bool_)
        self._failed = False
        space = self.single_action_space
        check_batchable(self.name, observation_space, space)
        self._chunks = action_chunks
        self._action_space = action_chunks.space(space) if action_chunks else space
        if rescale_actions and not (isinstance(space, spaces.Box) and space.is_bounded()):
            raise ConfigError(f"env.rescale_actions needs a bounded Box, but {self.name} takes {space}")

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Which rows the last answer was about, and the next actions are for."""
        return np.arange(self.num_envs) if self._pool is None else self._pool.rows

    @property
    def policy_action_space(self) -> spaces.Space[Any]:
        """The actions, or chunks, that a policy gives one row: in [-1, 1] where they are rescaled."""
        space = self._action_space
        return spaces.Box(-1.0, 1.0, space.shape, np.float32) if self._rescale else space

    def reset(self) -> Tree:
        """Begin a new episode in every row.

        Returns:
            The observations, a tree of `[N, ...]`; of `rows` only, if it answers in parts.

        Raises:
            EnvironmentFailure: The simulator failed.
        """
        observation = self._reset(np.ones(self.num_envs, np.bool_), options=None)
        # Where others are ready first, a row's first answer comes from its reset.
        self._resets_next[:] = True
        self._resets_next[self.rows] = False
        if self.film is not None:
            self.film.began()
        return observation

    def step(self, actions: Any) -> Step:
        """Step the rows that the last answer was about, and begin the next episode of the finished ones.

        Args:
            actions: Array `[N, *action shape]`, of chunks `[N, C, *action shape]`; for a Dict or Tuple
                action space a tree of such arrays. They are cast to the dtype of the action space.

        Raises:
            EnvironmentFailure: The actions have the wrong shape, hold NaN or are outside the action
                space, or the simulator failed.
        """
        try:
            actions = actions_for(
                self._action_space,
                self.rows,
                actions,
                rescale=self._rescale,
                clip=self._clip,
            )
        except ValueError as error:
            raise EnvironmentFailure(
                f"{self.name} cannot take the actions{self._hint(actions)}: {error}"
            ) from None
        if self._chunks is None:
            step, infos = self._advance(actions)
        else:
            single = self.single_action_space
            step, infos = self._chunks.carry_out(single, actions, self._advance, self.goes_on)
        done = step.terminated | step.truncated
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            self._resets_next[step.rows] = done
        else:
            step.reset = done
        if done.any():
            self._end_episodes(step, done, infos)
        return step

    def _hint(self, actions: Any) -> str:
        """What may be wrong with actions that have the wrong shape."""
        if self._chunks is not None:
            return f" (env.num_action_chunks: {self._chunks.size})"
        single, found = self.single_action_space.shape, np.shape(on_cpu(actions))
        if single is None or len(found) != len(single) + 2 or found[2:] != single:
            return ""
        return f" (chunks of {found[1]}? set env.num_action_chunks)"

    def _advance(self, actions: Any) -> tuple[Step, dict[str, Any]]:
        """Step the simulators once; rows that finish are left as they are."""
        if self._pool is None:
            self._draw_seeds(self._resets_next)
        with self._guard("step"):
            start = time.perf_counter()
            observation, reward, terminated, truncated, infos = self.vector_env.step(actions)
            seconds = time.perf_counter() - start
            if self._chunks is not None:
                ended, cut = chunks.ends(infos)
                terminated, truncated = terminated | ended, truncated | cut
            rows = self.rows
            valid = ~self._resets_next[rows]
            step = Step(
                observation=self._observations.of_step(observation, infos),
                reward=np.where(valid, self._per_row("rewards", reward, np.float64), 0.0),
                terminated=self._per_row("terminations", terminated, np.bool_) & valid,
                truncated=self._per_row("truncations", truncated, np.bool_) & valid,
                final_observation=None,
                success=self._successes(infos),
                succeeded=None,
                valid=valid,
                reset=~valid,
                step_seconds=seconds,
                reset_seconds=0.0,
                rows=rows,
            )
            if step.success is not None:
                step.success &= valid
            step.succeeded = step.success
        if self.film is not None:
            over = bool(step.terminated[0] or step.truncated[0])
            self.film.stepped(over, self.autoreset_mode is not AutoresetMode.SAME_STEP)
        return step, infos

    def close(self) -> None:
        """Close the simulators; a second time does nothing.

        Raises:
            EnvironmentFailure: The simulator failed.
        """
        if self.film is not None:
            self.film.close()
        if self._base.closed:
            return
        if self._failed and isinstance(self._base, AsyncVectorEnv):
            # Its own close would wait for an answer from a process that may be gone.
            for process in self._base.processes:
                process.kill()
                process.join()
            self._base.closed = True
            return
        with self._guard("close"):
            self.vector_env.close()

    def _end_episodes(self, step: Step, done: Rows, infos: dict[str, Any]) -> None:
        match self.autoreset_mode:
            case AutoresetMode.DISABLED:
                step.final_observation = step.observation
                start = time.perf_counter()
                # The vector env takes the mask out of the options; the simulator does not see it.
                options = {"reset_mask": done.copy()}
                step.observation = self._reset(done, options, before=step.observation)
                step.reset_seconds = time.perf_counter() - start
            case AutoresetMode.NEXT_STEP:
                step.final_observation = step.observation
            case AutoresetMode.SAME_STEP:
                self._draw_seeds(done)
                with self._guard("step"):
                    self._take_the_end_from_infos(step, done, infos)

    def _reset(self, rows: Rows, options: dict[str, Any] | None, before: Tree = None) -> Tree:
        seeds = self._draw_seeds(rows)
        self.before_reset()
        with self._guard("reset"):
            observation, infos = self.vector_env.reset(seed=seeds, options=options)
            return self._observations.of_reset(observation, infos, before, rows)

    def _draw_seeds(self, rows: Rows) -> Any:
        seeds = [self._seed_of(row) if rows[row] else None for row in range(self.num_envs)]
        given = [seed for seed in seeds if seed is not None]
        if given and isinstance(self._base, (SyncVectorEnv, AsyncVectorEnv, BatchedEnv)):
            return seeds
        return given[0] if given else None

    def _take_the_end_from_infos(self, step: Step, done: Rows, infos: dict[str, Any]) -> None:
        step.final_observation = self._observations.of_the_end(step.observation, infos, done)
        ended = self._successes(infos.get("final_info", {}))
        if ended is not None:
            others = False if step.success is None else step.success
            step.success = step.succeeded = np.where(done, ended, others)

    def _successes(self, infos: Mapping[str, Any]) -> Rows | None:
        key = next((key for key in self._success_keys if key in infos), None)
        if key is not None:
            self._reports_success = True
            reported = self._per_row(f"info {key!r}", infos[key], np.bool_)
            return reported & np.asarray(infos.get(f"_{key}", True), np.bool_)
        # A simulator may name success only where there is one: from then on, silence is failure.
        return np.zeros(self._at_once, np.bool_) if self._reports_success else None

    def _per_row(self, what: str, values: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        rows: npt.NDArray[Any] = one_per_row(what, values, self._at_once, dtype)
        return rows

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        try:
            with errors_named(self.name, what, quiet=isinstance(self._base, AsyncVectorEnv)):
                try:
                    yield
                except (EOFError, ConnectionError) as error:
                    raise self._lost_process() or error from None
        except BaseException:
            self._failed = True
            raise

    def _lost_process(self) -> Exception | None:
        """What has happened to the process of a row, if that is why it does not answer."""
        if not isinstance(self._base, AsyncVectorEnv):
            return None
        processes = self._base.processes
        connection.wait([process.sentinel for process in processes], timeout=_TO_END)
        for row, process in enumerate(processes):
            if process.exitcode is not None:
                code = process.exitcode
                how = f"was killed by {Signals(-code).name}" if code < 0 else f"exited with code {code}"
                return wrappers.SubEnvError(f"row {row}: its process {how}")
        return None


def success_keys(configured: str | None) -> tuple[str, ...]:
    """The infos that may tell success, the first one first."""
    return (configured,) if configured else ("success", "is_success")


@contextmanager
def errors_named(name: str, what: str, quiet: bool) -> Iterator[None]:
    """Turn what the simulator `name` raises in `what` into an `EnvironmentFailure`."""
    try:
        with warnings.catch_warnings() if quiet else nullcontext():
            if quiet:
                # AsyncVectorEnv also warns of the error that it raises.
                warnings.filterwarnings("ignore", ".*(Received the following|Traceback|Raising the)")
            yield
    except ZmqrlError:
        raise
    except gymnasium.error.UnregisteredEnv as error:
        # What Gymnasium says is all there is to know; its traceback is of its own search.
        words = f"there is no simulator {name}: {error}"
        if isinstance(error, gymnasium.error.NameNotFound) and ":" not in name and "mean" not in words:
            words += f" If a package registers it, write package:{name}"
        raise EnvironmentFailure(words) from None
    except wrappers.SubEnvError as error:
        # In one line; the traceback is shown with the cause.
        words, _, trace = str(error).partition("\n\n")
        cause = (error.__cause__ or error) if trace else None
        raise EnvironmentFailure(f"{name} failed in {what}: {words}") from cause
    except (Exception, SystemExit) as error:  # it may call sys.exit, which would end us without a word
        raise EnvironmentFailure(f"{name} failed in {what}: {in_a_line(error)}") from error
