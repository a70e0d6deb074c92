"""The embedded engine server: a child process, the only one with `training` that imports torch."""
