"""Finds the weights of a policy model, makes its tokenizer, and tells what fits this machine.

In: a `ModelConfig`. Out: a `ModelFolder` on the local disk (safetensors, configuration, tokenizer), a `Tokenizer`, a
memory estimate. Runs in the main process, so nothing here imports torch; what needs torch (reading a GGUF, drawing
random weights) is `models.convert`, a child process. Knows no engine, trainer or loop.
"""

from claw_train.models.find import ModelFolder, find_model, find_tokenizer, model_config
from claw_train.models.memory import MemoryNeed, check_fits, memory_needed, what_fits
from claw_train.models.tokenizer import Tokenizer

__all__ = [
    "MemoryNeed",
    "ModelFolder",
    "Tokenizer",
    "check_fits",
    "find_model",
    "find_tokenizer",
    "memory_needed",
    "model_config",
    "what_fits",
]
