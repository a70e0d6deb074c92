"""The durable record of every turn: the only source of training data."""
