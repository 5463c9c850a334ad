"""What no message may do: kill or stall who reads it, let its memory grow, or harm another peer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from fuzz import broker, learner, readers

ABOUT = "Feed nonsense to every decoder and every socket, while good peers are served."

COLUMNS = ("case", "messages", "decoded", "refused", "crashed", "hung", "served", "rss_growth", "ok")

_SHARES = {"headers": 0.35, "trees": 0.35, "replies": 0.02}
"""Of the messages, by what a process of its own reads; the rest goes to a broker and a learner."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--messages", type=int, default=1_000_000, help="in all (default 1,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the generator (default 0)")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each reader."""
    for case, share in _SHARES.items():
        yield readers.measure(case, int(share * options.messages), options.seed)
    yield from broker.measure(int(0.2 * options.messages), options.seed)
    yield from learner.measure(int(0.08 * options.messages), options.seed)
