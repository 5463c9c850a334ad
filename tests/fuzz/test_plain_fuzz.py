"""A plain generator of nonsense against every decoder, and against peers that a stranger answers.

`bin/bench fuzz` is the long form, with live sockets.
"""

import pytest
from fuzz import readers

from zmqrl.errors import DecodeError


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", readers.READERS)
def test_nonsense_is_read_or_refused_and_nothing_else(case, seed):
    refused = 0
    for message, error in readers.read(case, 3000, seed):
        assert error is None or isinstance(error, DecodeError), (error, message)
        refused += error is not None
    assert 1000 < refused < 3000


@pytest.mark.parametrize(("asker", "good"), readers.ASKERS, ids=lambda a: getattr(a, "__name__", ""))
def test_a_peer_that_hears_nonsense_ends_in_one_of_its_named_errors(folder, asker, good):
    strange = readers.Strange(f"ipc://{folder}/x", good(), seed=0)
    try:
        while strange.sent < 300:
            asker(f"ipc://{folder}/x")
    finally:
        strange.close()
