"""The default sandbox: Linux namespaces through bubblewrap, no daemon, some 25 ms to start.

In: limits. Out: a `Sandbox` with its own processes, files, users and network (loopback only). Works for root and for
an unprivileged user with user namespaces; `capabilities` says which limits the machine really enforces.
"""

from claw_envs.sandbox.hosted import HostedSandbox


class NamespaceSandbox(HostedSandbox):
    """One disposable machine on the host's kernel and programs. See `Sandbox` for the methods."""

    local = False
