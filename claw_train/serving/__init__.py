"""Talks to engines, renders prompts and (later) serves people."""
