"""Several processes as one job: who takes part, who has died, and when all of them stop.

JAX's runtime moves the arrays. When a peer dies, it aborts a process with a stack trace or leaves
it waiting in a collective; and it does not report two processes that were started with one id or
with different configs. This package does. It knows processes, not arrays.

The processes recognize each other by a secret of the job (`lbopt.job._secret`).

    guard (one per process)  ->  member (the process that computes, the guard's child)
      |  TCP, authenticated JSON lines
    hub (in the guard of process 0): roll call, heartbeats, agreement of all, the first failure
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
