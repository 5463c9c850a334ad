"""The seeds of episodes: the same start states each time, whoever steps an env."""

from __future__ import annotations

from collections.abc import Iterable


class Seeds:
    """One seed for each env and episode.

    Args:
        base: Of the first episode of the first env.
        first: Index of the first row, over all envs that ask the same policy.
        total: Number of these envs.
    """

    def __init__(self, base: int, first: int, total: int) -> None:
        self._base = base
        self._first = first
        self._total = total
        self._begun: dict[int, int] = {}

    def __call__(self, row: int) -> int:
        """The seed of the next episode of a row."""
        number = self._begun.get(row, 0)
        self._begun[row] = number + 1
        return self._base + self._first + row + number * self._total

    def restart(self) -> None:
        """Begin with the first episodes again."""
        self._begun.clear()

    def begin_again(self, played: Iterable[int]) -> None:
        """Go on with the episodes under way: of each row, the one after so many that were played."""
        self._begun = {row: int(number) for row, number in enumerate(played)}


def no_seed(row: int) -> None:
    """Let the simulator go on."""
    return
