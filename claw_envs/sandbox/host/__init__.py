"""The part that runs in the launcher process: folders, mounts, cgroups, leases and processes of sandboxes.

Standard library only and relative imports only, so that the launcher starts in some 40 ms without loading the rest
of the package. Nothing here knows commands, tasks or rewards.
"""
