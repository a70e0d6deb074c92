"""Gymnasium environments for language-model agents, on real sandboxes.

Importing registers the ids (`gym.make("ClawTerminal-v0")`) and loads nothing else: each environment is imported when it
is made. Knows nothing of policies, tokens or training.
"""

from gymnasium.envs.registration import register, registry

__all__ = ["ENVS"]

ENVS = {"ClawTerminal-v0": "claw_envs.terminal.env:TerminalEnv"}
"""Gymnasium id -> entry point."""

for _id, _entry_point in ENVS.items():
    if _id not in registry:
        register(id=_id, entry_point=_entry_point)
