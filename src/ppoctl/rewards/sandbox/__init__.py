"""Sandbox for programs that a model wrote. A job goes in and its output comes out; expected outputs never enter it.

    client     the scorer's side: starts a launcher, sends jobs, tests whether a sandbox isolates programs
      launcher   a process that never held a ground truth: forks into a sandbox, enforces limits, kills its processes
        jail       steps from a forked process to the program: namespaces, root, limits, privileges
          kernel     system calls that Python does not provide
          seccomp    system calls that the program must not use
    job        jobs, limits and results

The recipe chooses one of two isolation layers; both have the same limits and system-call filter. `namespaces` works
for every user who may create a user namespace, root or not: the program sees only its own processes, files, network
and shared memory. `user` is for root if new namespaces are forbidden, as in most containers: the program runs as a
user id of its own, and Landlock lets it read only system files.

Existing tools were considered: bubblewrap (like `namespaces`), nsjail (the same, with cgroups), isolate (for
programming contests) and firejail (a setuid binary). None is a Python package, so root would have to install it on
every node. None handles deadlines, output limits, exit kinds and orphans of a killed scorer. gVisor and virtual
machines isolate more strongly (a kernel bug is not enough to escape); use them behind a Sandbox Fusion endpoint.

Standard library only.
"""
