"""Pure tensor functions, one family a file."""
