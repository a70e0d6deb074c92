"""Trains any language-model agent from what happens next. See `orchestrator` for the picture."""
