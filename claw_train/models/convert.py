"""Child process that writes a model folder: `python -m claw_train.models.convert WHAT ... --out DIR`.

In: a GGUF file, or a seeded configuration. Out: safetensors, configuration and tokenizer files in the folder given.
The only part of `models` that imports torch. The folder is temporary: its caller makes it durable and visible.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from claw_train.children import watch_parent
from claw_train.errors import ModelError, boundary


def tokenizer_from_gguf(gguf: Path, out: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(str(out))


def weights_from_gguf(gguf: Path, out: Path) -> None:
    """Writes the weights, dequantised to float32."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    # a model that keeps its GGUF quantisation cannot be saved
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(str(out))


def random_weights(settings: dict[str, Any], out: Path) -> None:
    """Writes seeded random float32 weights of the architecture `settings["model_type"]`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(settings)
    torch.manual_seed(int(settings.pop("seed")))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    model.save_pretrained(str(out))


def main(argv: list[str] | None = None) -> int:
    """Runs one conversion; exit code 2 and one line on standard error when it fails."""
    parser = argparse.ArgumentParser(prog="claw_train.models.convert", description="Write a model folder.")
    parser.add_argument("what", choices=["tokenizer", "model", "random"])
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--settings", type=json.loads, help="JSON; with `random`")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    watch_parent()
    try:
        with boundary(ModelError, f"writing {args.what}"):
            if args.what == "random":
                random_weights(args.settings, args.out)
            else:
                tokenizer_from_gguf(args.gguf, args.out)
            if args.what == "model":
                weights_from_gguf(args.gguf, args.out)
    except ModelError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
