"""Logging of every process: one line, level, module, message; never content of prompts or replies at INFO."""

import logging
import sys


def setup_logging(level: str = "WARNING") -> None:
    """Sends the log of this process to standard error; called by command lines and child mains only."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format="%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
