"""Turns scored turns into batches."""
