"""The processes of the bench `fuzz`.

child.py readers CASE MESSAGES SEED
child.py learner ENDPOINT REPORT
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[depth]) for depth in (1, 2)]

from fuzz import learner, readers  # noqa: E402

if __name__ == "__main__":
    logging.disable()
    part, first, *others = sys.argv[1:]
    if part == "readers":
        readers.main(first, *map(int, others))
    else:
        learner.main(first, *others)
