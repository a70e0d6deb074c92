"""Logging of every process: one line, level, module, message; never content of prompts or replies at INFO."""

import logging
import sys
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"


def setup_logging(level: str = "INFO", *, file: Path | None = None) -> None:
    """Sends this process's log to `file`, or to standard error; called by command lines and child mains only."""
    handler = logging.FileHandler(file) if file else logging.StreamHandler(sys.stderr)
    logging.basicConfig(handlers=[handler], level=level, format=_FORMAT, datefmt="%H:%M:%S", force=True)
    logging.getLogger("httpx").setLevel("WARNING")
