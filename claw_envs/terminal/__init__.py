"""ClawTerminal: a shell in a sandbox, small file tasks, verdicts from the file system's end state."""
