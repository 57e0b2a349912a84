"""Where programs run that a model wrote: a job goes in, its output comes out, and expected outputs stay outside.

    client     the scorer's side: starts a launcher, asks it, tries whether a sandbox holds
      launcher   a process that has never known an answer: forks into a sandbox, watches over limits, ends all of it
        jail       steps from a forked process to the program: namespaces, root, limits, privileges
          kernel     system calls that Python has not
          seccomp    system calls that the program has not
    job        what goes in and what comes out

Two walls, of which a recipe chooses one, and the same limits and filter of system calls behind both. `namespaces` is
for whoever may make a user namespace, root or not: the program sees processes, files, network and shared memory of
its own only. `user` is for root where new namespaces are forbidden, as in most containers: the program is a user whom
nobody else is, and Landlock closes all files to it but the system's, which it may read.

Well-kept tools were weighed: bubblewrap does what `namespaces` does here, nsjail that and cgroups, isolate that for
contests, firejail with a setuid binary. None is a Python package, so each would be one more thing to install as root
on every node, and none answers for what is left: deadlines, output, kinds of ends, and no orphan when the scorer is
killed. gVisor and virtual machines hold more (a bug of the kernel is not enough to leave them); they are what a
Sandbox Fusion endpoint may run in.

Standard library only.
"""
