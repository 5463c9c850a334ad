"""Which policy answers a request: that with the newest weights, or one that it is pinned to."""

from __future__ import annotations

import copy
import logging
import operator
import time
from typing import Any

from zmqrl.errors import PolicyError, WeightsError
from zmqrl.rollout.download import Weights, WeightsDownload
from zmqrl.rollout.policy import Policy, keeps_state, parameters_of

log = logging.getLogger(__name__)


class PolicyVersions:
    """A policy whose weights may change between two batches, and a copy of it for evaluations.

    Args:
        policy: Loaded; it must have `load_state_dict` if there is a download.
        download: Where weights come from; None if they never change.
        version: Of the weights that it has; None if the policy itself tells.

    Raises:
        PolicyLoadError: It takes a state, but has no `initial_state`.
    """

    def __init__(
        self, policy: Policy, download: WeightsDownload | None = None, version: int | None = None
    ) -> None:
        self._policy = policy
        self._download = download
        self._version = version
        self.takes_valid_mask = "valid_mask" in parameters_of(getattr(policy, "infer", None))
        """Whether it is told which rows are padding."""
        self.keeps_state = keeps_state(policy)
        """Whether it has a memory."""
        self._tried: Weights | None = None
        """The newest weights when it was last looked."""
        self._held: Weights | None = None
        """Those that the policy has."""
        self._copy: Policy | None = None
        self._copy_holds: Weights | None = None
        self._has_complained = False
        self.load_seconds = 0.0
        """Spent in loading weights, in all."""
        if version is None and download is None:
            self._own_version()  # what is wrong with it is said at start-up

    @property
    def device(self) -> Any:
        """Where it runs; None if the policy does not tell."""
        return getattr(self._policy, "device", None)

    @property
    def takes_one_mode(self) -> bool:
        """Whether rows to explore with and rows to evaluate are two calls of it."""
        return bool(getattr(self._policy, "takes_one_mode", False))

    @property
    def wants_pinned(self) -> bool:
        """Whether its batches should be in page-locked memory; it says when the GPU has read them."""
        return bool(getattr(self._policy, "wants_pinned", False))

    @property
    def version(self) -> int:
        """Of the weights that answer requests which are not pinned."""
        return self._own_version() if self._version is None else self._version

    def _own_version(self) -> int:
        """What the policy tells; 0 where its `version` is something else, as libraries have it."""
        told: Any = None
        try:
            told = getattr(self._policy, "version", None)
            number = 0 if told is None else operator.index(told)
        except Exception:  # it is the user's code, and may be a tensor of several numbers
            number = -1
        if 0 <= number < 2**63:
            return number
        if not self._has_complained:
            self._has_complained = True
            what = f"the int {told}" if isinstance(told, int) else f"a {type(told).__name__}"
            log.warning("replies carry version 0: the policy's own is %s, not an int from 0 up", what)
        return 0

    def load(self, weights: Weights) -> None:
        """Replace the weights.

        Raises:
            WeightsError: They do not fit; the version stays what it was.
        """
        self._tried = weights
        self._load(self._policy, weights)
        self._held, self._version = weights, weights.version
        if self._download is not None:
            self._download.loaded += 1
            self._download.serving = weights.version

    def refresh(self) -> None:
        """Load the newest weights, if there are any; weights that do not fit change nothing.

        Raises:
            StartupFailed: The thread that fetches weights has failed.
        """
        if self._download is None:
            return
        weights = self._download.newest()
        if weights is None or weights is self._tried:
            return
        try:
            self.load(weights)
        except WeightsError as error:
            self._download.unfit += 1
            log.warning("version %d stays: %s", self.version, error)

    def close(self) -> None:
        """End the download."""
        if self._download is not None:
            self._download.close()

    def lacks(self, version: int) -> bool:
        """Whether the weights that a request is pinned to are not here, but may still come."""
        return (
            self._download is not None
            and version not in (0, self._version_held_now())
            and self._download.of(version) is None
        )

    def of(self, version: int) -> tuple[Policy, int]:
        """The policy that answers a request, and the version of its weights.

        Args:
            version: That the request is pinned to; 0 for the newest.

        Raises:
            PolicyError: The version cannot be had, or does not fit.
        """
        if version == 0 or version == self._version_held_now():
            return self._policy, self.version
        weights = None if self._download is None else self._download.of(version)
        if weights is None:
            raise PolicyError(
                f"the weights of version {version}, which the request asks for, cannot be had; "
                f"this worker serves version {self.version}"
            )
        if self._copy is None:
            self._copy = copy.deepcopy(self._policy)
        if weights is not self._copy_holds:
            try:
                self._copy_holds = None  # should the load stop half way
                self._load(self._copy, weights)
            except WeightsError as error:
                raise PolicyError(f"version {version} cannot be loaded: {error}") from error
            self._copy_holds = weights
        return self._copy, version

    def _version_held_now(self) -> int:
        """The version of the policy's weights; -1 if a learner of that life is no more.

        A learner that was restarted may give a number a second time, to other weights.
        """
        if self._download is not None and self._held is not None:
            return self.version if self._download.epoch == self._held.epoch else -1
        return self.version

    def _load(self, policy: Any, weights: Weights) -> None:
        begin = time.perf_counter()
        load = getattr(policy, "load_state_dict", None)
        if not callable(load):
            raise WeightsError(f"a {type(policy).__name__} has no load_state_dict")
        try:
            load(weights.arrays)
        except Exception as error:
            raise WeightsError(f"version {weights.version} does not fit the policy: {error}") from error
        finally:
            self.load_seconds += time.perf_counter() - begin
