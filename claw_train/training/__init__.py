"""Trainer ranks: child processes that import torch."""
