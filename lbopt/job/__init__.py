"""Many processes as one job: who takes part, who has died, where all stop.

JAX's runtime carries the arrays. It ends a process whose peer has died by an abort with a stack trace, or leaves it waiting
in a collective, and it does not say that two processes were started with one id or with two configs. That is what this room is
for: it knows processes and no arrays.

Who takes part is decided by a secret of the job (`lbopt.job.secret`).

    guard (one a process)  ->  member (the process that computes, the guard's child)
      |  TCP, JSON lines with codes
    hub (in the guard of process 0): roll call, heartbeats, what all have said, the first failure
"""
