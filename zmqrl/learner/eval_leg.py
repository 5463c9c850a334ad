"""The learner's side towards eval workers: they wait for evaluations, and say what is done."""

from __future__ import annotations

from typing import Any

from zmqrl.learner.peers import MOST_NAMES, Peers
from zmqrl.learner.shared import Shared
from zmqrl.transport.codec import MAX_REQUEST, decode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op


class EvalLeg:
    """Hands out evaluations.

    Args:
        shared: What the learner touches too.
        peers: The way to eval workers.
    """

    def __init__(self, shared: Shared, peers: Peers) -> None:
        self._shared = shared
        self._peers = peers

    def evaluate(self, peer: bytes, header: Header, frames: list[Any]) -> None:
        """EVALUATE.

        Raises:
            DecodeError: It is not valid.
        """
        fields = decode_meta(frames[0][HEADER_SIZE:], MAX_REQUEST)
        name = str(fields.get("name"))[:200]
        shared = self._shared
        # An earlier life of the learner numbered its evaluations from 1, too.
        done = header.request_id if fields.get("epoch") == self._shared.epoch else 0
        order = shared.order
        if order is not None and done == order.number and shared.finished.get(name) != done:
            if len(shared.finished) < MOST_NAMES:
                shared.finished[name] = done
            shared.lock.notify_all()
        if order is not None and done < order.number and shared.finished.get(name) != order.number:
            answer = Header(Op.EVALUATE, request_id=order.number, policy_version=order.version)
            self._peers.say(peer, answer, {"env_steps": order.env_steps, "epoch": self._shared.epoch})
        else:
            self._peers.say(peer, Header(Op.WELCOME), {})
