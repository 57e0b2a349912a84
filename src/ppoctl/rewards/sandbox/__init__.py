"""Sandbox for programs that a model wrote. A sandbox receives a job and returns the program's output; it never
receives an expected output.

    sandbox_client   the scorer's side: starts a launcher, sends jobs, tests whether a sandbox isolates programs
      launcher         a process that never held a ground truth: forks into a sandbox, sets limits, kills processes
        jail             steps from a forked process to the program: namespaces, root, limits, privileges
          kernel           system calls that Python does not provide
          seccomp          system calls that the program must not use
    job              jobs, limits and results

The recipe chooses one of two isolation layers; both have the same limits and system-call filter. `namespaces` works
for every user who may create a user namespace, root or not: the program sees only its own processes, files, network
and shared memory. `user` requires root, and is for machines that forbid new namespaces, such as most containers: the
program runs under a separate user id, and Landlock lets it read only system files.

Existing tools were considered: bubblewrap (like `namespaces`), nsjail (the same, with cgroups), isolate (for
programming contests) and firejail (a setuid binary). None is a Python package, so root would have to install it on
every node. None handles deadlines, output limits, exit kinds and orphans of a killed scorer. gVisor and virtual
machines isolate more strongly (a kernel bug is not enough to escape); use them behind a Sandbox Fusion endpoint.

Imports only the standard library.
"""
