"""The env loop: observations to the pool, actions to the simulators."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqrl.client import PolicyClient
from zmqrl.env.adapters import Rows
from zmqrl.env.delays import DelaySampler
from zmqrl.env.links import LinkEmulation
from zmqrl.env.stage import Stage
from zmqrl.env.tally import Tally
from zmqrl.env.trajectories import Trajectories
from zmqrl.errors import StateLost
from zmqrl.process import StopSignal
from zmqrl.transport.rows import finite, not_finite

log = logging.getLogger(__name__)

_LOOK_EVERY = 0.25
"""Seconds after which a wait looks whether it should go on."""

_MOST_LOST = 100
"""Times that states may be lost with no episode in between that came to its end."""


class EnvLoop:
    """Plays the stages of an env worker in turn: one is stepped while the others wait for actions.

    Args:
        stages: What it plays.
        client: Asks for actions.
        policy: The name of the one that is asked; empty for the pool's own.
        tally: Counts what happens.
        trajectories: Where steps are recorded; None if there is no learner.
        delays: By how much steps are delayed.
        links: By how much replies are late.
        stop: Ends the loop between two steps.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        client: PolicyClient,
        policy: str,
        tally: Tally,
        trajectories: Trajectories | None,
        delays: DelaySampler,
        links: LinkEmulation,
        stop: StopSignal,
    ) -> None:
        self._stages = stages
        self._client = client
        self._policy = policy
        self._tally = tally
        self._trajectories = trajectories
        self._delays = delays
        self._links = links
        self._stop = stop
        self._version = 0  # that requests are pinned to; 0 for the newest
        self._lost_in_a_row = 0  # states, with no episode in between that came to its end
        for stage in stages:
            stage.shard.before_reset = self._say_that_it_resets
            stage.shard.goes_on = self._goes_on_with_a_chunk

    def restart(self, version: int) -> None:
        """Let every row play its episodes again, with the weights of `version`."""
        self._version = version
        for stage in self._stages:
            stage.restart()

    def run(self) -> bool:
        """Reset the simulators and step them until every row has played its episodes.

        Returns:
            Whether they have; False if the loop was stopped.

        Raises:
            EnvironmentFailure: A simulator failed.
            ClientError: The pool gave no actions, or no rewards, with the reason.
        """
        active = list(self._stages)
        for stage in active:
            self._delay()
            self._reset(stage)
        self._tally.tell(now=True)
        while active and not self._stop():
            for stage in list(active):
                if stage.pending is None:
                    self._wait_to_begin(stage)
                else:
                    self._advance(stage)
                if stage.finished():
                    active.remove(stage)
                    self._client.rest(stage.index)
        return not active

    def _reset(self, stage: Stage) -> None:
        begin = time.perf_counter()
        observation = stage.shard.reset()
        self._tally.totals.count_reset(time.perf_counter() - begin)
        self._observe(stage, observation, np.ones(len(stage.shard.rows), bool))

    def _observe(self, stage: Stage, observation: Any, reset: Rows) -> None:
        """Take in what the simulators show, and ask for actions, if that is allowed now."""
        stage.observation, stage.reset = observation, reset
        problem = not_finite(observation, "observation", stage.shard.rows)
        if problem:
            self._tally.count_problem(stage.shard.name, problem)
        if self._trajectories is not None:
            self._trajectories.asked(stage)
            if not self._trajectories.may_begin(stage):
                stage.held_since = time.monotonic()
                # In normal mode others must not wait at a barrier for what may not be asked.
                self._client.rest(stage.index)
                return
        self._ask(stage)

    def _ask(self, stage: Stage) -> None:
        stage.sent = time.monotonic()
        # The shard owns the observation's memory and makes a new one at each step: no copy is needed.
        stage.pending = self._client.submit(
            finite(stage.observation),
            copy=False,
            stage=stage.index,
            policy=self._policy,
            version=self._version,
            ids=stage.shard.rows if stage.shard.answers_in_parts else None,
            reset=stage.reset,
        )

    def _wait_to_begin(self, stage: Stage) -> None:
        """Wait a little for the learner to let the next trajectory begin."""
        assert self._trajectories is not None
        assert stage.held_since is not None
        others = any(other.pending is not None for other in self._stages)
        may_begin = self._trajectories.may_begin(stage)
        if not may_begin:
            self._trajectories.wait(0.0 if others else _LOOK_EVERY)
        now = time.monotonic()
        self._tally.totals.gate_s += now - stage.held_since
        stage.held_since = now
        if may_begin:
            self._ask(stage)
        else:
            self._tally.tell()

    def _advance(self, stage: Stage) -> None:
        """Wait for the actions of `stage`, step its simulators, and ask for the next actions."""
        pending, tally = stage.pending, self._tally
        assert pending is not None
        while not pending.wait(_LOOK_EVERY):
            if self._trajectories is not None:
                self._trajectories.collect()
            tally.tell()
            if self._stop():
                return
        try:
            reply = pending.result()
        except StateLost as lost:
            self._begin_again(stage, lost)
            return
        tally.count_reply(pending, stage.sent)
        self._stop.sleep(self._links.seconds(*pending.sizes))
        delayed = tally.totals.delay_s
        self._delay()
        step = stage.shard.step(reply["actions"])  # a chunk has delays between its steps, too
        if self._stop():
            return  # it may have left the rest of a chunk out
        tally.count_step(stage.shard.name, step, tally.totals.delay_s - delayed)
        if self._trajectories is not None:
            self._trajectories.stepped(stage, reply, pending.policy_version, step)
            while not self._trajectories.may_go_on(_LOOK_EVERY) and not self._stop():
                tally.tell()
        stage.pending = None
        ended = stage.account(step)
        if ended:
            tally.add(ended)
            self._lost_in_a_row = 0
        if not stage.finished():
            self._observe(stage, step.observation, step.reset)
        tally.tell()

    def _begin_again(self, stage: Stage, lost: StateLost) -> None:
        """The states of a policy with memory are lost: its episodes begin again.

        Raises:
            StateLost: That happens again and again, before any episode has come to its end.
        """
        self._lost_in_a_row += 1
        if self._lost_in_a_row > _MOST_LOST:
            raise lost
        log.warning("%s: its episodes begin again: %s", stage.shard.name, lost)
        self._tally.totals.state_lost += stage.begin_again()
        if self._trajectories is not None:
            self._trajectories.abandon(stage)
        stage.pending = None
        self._reset(stage)
        self._tally.tell()

    def _say_that_it_resets(self) -> None:
        """Say so before, because a simulator that hangs says nothing more (a step needs no word)."""
        self._client.phase("reset")

    def _goes_on_with_a_chunk(self) -> bool:
        self._tally.tell()
        self._delay()
        return not self._stop()

    def _delay(self) -> None:
        totals = self._tally.totals
        seconds = self._delays.sample(totals.shard_steps)
        begin = time.perf_counter()
        self._stop.sleep(seconds)
        totals.delay_s += time.perf_counter() - begin
