"""The lane for large arrays between processes of one host: they stay in memory that both can see.

A *slot* is a piece of memory of the sender's, a memfd, that holds the large arrays of one message; in
their place a *descriptor* of a few bytes crosses the sockets. A reader opens the slot through
`/proc/PID/fd/FD`. That it is on the same host, in the same namespace of processes, and allowed to, is
shown and not assumed: each slot begins with a random token, which the descriptor repeats. Whatever does
not fit makes the arrays travel over the socket.

A memfd has no name. Nothing is left in /dev/shm however a process ends, and the kernel frees the memory
with the last process that has it mapped. `multiprocessing.shared_memory` has names, which outlive a
SIGKILL, and a resource tracker that unlinks the segments of others (until Python 3.13).

*Reuse.* Nobody ever writes into a slot that somebody may still read:

* A request's slot is used again after its reply, if the request was sent once and given to one rollout
  worker. Otherwise another worker may still be reading it: then its owner lets go of it, and the memory
  lasts for as long as that worker has it mapped.
* A reply's slot is used again when its reader has written into it that it has its copy; if that takes
  too long, its owner lets go of it.

Each use has a number, its *generation*; a descriptor of an earlier one is refused.

Only Linux has memfds; elsewhere the lane is never open.
"""

from zmqrl.transport.sharedmem.descriptor import size_of
from zmqrl.transport.sharedmem.lane import Lane
from zmqrl.transport.sharedmem.reader import Reader
from zmqrl.transport.sharedmem.slots import KEPT_S, LEAST, Slot, Slots, proof

__all__ = ["KEPT_S", "LEAST", "Lane", "Reader", "Slot", "Slots", "proof", "size_of"]
