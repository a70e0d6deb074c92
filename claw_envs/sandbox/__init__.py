"""Sandbox backends behind one protocol, `base.Sandbox`."""
