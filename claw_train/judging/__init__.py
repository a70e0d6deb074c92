"""Turns next states into rewards and hints."""
