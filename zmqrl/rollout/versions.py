"""Which policy answers a request: that with the newest weights, or one that it is pinned to."""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

from zmqrl.errors import PolicyError, WeightsError
from zmqrl.rollout.download import Weights, WeightsDownload
from zmqrl.rollout.policy import Policy

log = logging.getLogger(__name__)

_WAIT_FOR_PINNED = 10.0
"""Seconds that a request waits for the weights that it is pinned to; they are on their way."""


class PolicyVersions:
    """A policy whose weights may change between two batches, and a copy of it for evaluations.

    Args:
        policy: Loaded; it must have `load_state_dict` if there is a download.
        download: Where weights come from; None if they never change.
        version: Of the weights that it has; None if the policy itself tells.
    """

    def __init__(
        self, policy: Policy, download: WeightsDownload | None = None, version: int | None = None
    ) -> None:
        self._policy = policy
        self._download = download
        self._version = version
        self._seen: tuple[int, int] | None = None  # epoch and version that were tried last
        self._pinned: Policy | None = None
        self._pinned_version = -1
        self.load_seconds = 0.0
        """Spent in loading weights, in all."""

    @property
    def device(self) -> Any:
        """Where it runs; None if the policy does not tell."""
        return getattr(self._policy, "device", None)

    @property
    def version(self) -> int:
        """Of the weights that answer requests which are not pinned."""
        return int(getattr(self._policy, "version", 0)) if self._version is None else self._version

    def refresh(self) -> None:
        """Load the newest weights, if there are any; weights that do not fit change nothing."""
        if self._download is None:
            return
        weights = self._download.newest()
        if weights is None or (weights.epoch, weights.version) == self._seen:
            return
        self._seen = (weights.epoch, weights.version)
        try:
            self._load(self._policy, weights)
            self._version = weights.version
            self._download.loaded += 1
        except WeightsError as error:
            self._download.failed += 1
            log.warning("version %d stays: %s", self.version, error)

    def close(self) -> None:
        """End the download."""
        if self._download is not None:
            self._download.close()

    def of(self, version: int) -> tuple[Policy, int]:
        """The policy that answers a request, and the version of its weights.

        Args:
            version: That the request is pinned to; 0 for the newest.

        Raises:
            PolicyError: The version cannot be had, or does not fit.
        """
        if version in (0, self.version):
            return self._policy, self.version
        if version == self._pinned_version and self._pinned is not None:
            return self._pinned, version
        weights = None
        if self._download is not None:
            weights = self._download.pinned(version, _WAIT_FOR_PINNED)
        if weights is None:
            raise PolicyError(
                f"the weights of version {version}, which the request asks for, cannot be had; "
                f"this worker serves version {self.version}"
            )
        if self._pinned is None:
            self._pinned = copy.deepcopy(self._policy)
        try:
            self._load(self._pinned, weights)
        except WeightsError as error:
            raise PolicyError(f"version {version} cannot be loaded: {error}") from error
        self._pinned_version = version
        return self._pinned, version

    def _load(self, policy: Any, weights: Weights) -> None:
        begin = time.perf_counter()
        load = getattr(policy, "load_state_dict", None)
        if not callable(load):
            raise WeightsError(
                f"a {type(policy).__name__} has no load_state_dict, so it cannot take any"
            )
        try:
            load(weights.arrays)
        except Exception as error:
            raise WeightsError(f"version {weights.version} does not fit the policy: {error}") from error
        finally:
            self.load_seconds += time.perf_counter() - begin
