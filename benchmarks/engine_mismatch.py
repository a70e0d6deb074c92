"""How far the engine's log-probabilities are from transformers' at the same weights.

    python benchmarks/engine_mismatch.py --model DIR [--dtype float32] [--write]

40 requests sample 256 tokens each at temperature 1, in one batch; transformers (float32) then scores the same ids one
sequence at a time. Reported over all 10,240 tokens: mean and max |d log p|, and k3 = mean(e^r - 1 - r) with
r = log p(transformers) - log p(engine).
"""

import argparse
import os
import random
from pathlib import Path
from typing import Any

from engine_throughput import Engine, circumstances, write

RESULTS = Path(__file__).parent / "results" / "engine_mismatch.json"


def sample(args: argparse.Namespace) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, reply, log-probabilities) of each request."""
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(1000, 40000) for _ in range(rng.randrange(16, 200))] for _ in range(args.requests)]
    engine = Engine(args.model, {}, "--dtype", args.dtype)
    sampling = [{"max_new_tokens": args.tokens, "ignore_eos": True, "sampling_seed": i} for i in range(len(prompts))]
    try:
        replies = engine.post("/generate", input_ids=prompts, sampling_params=sampling, return_logprob=True)
    finally:
        engine.close()
    return [
        (p, r["output_ids"], [t[0] for t in r["meta_info"]["output_token_logprobs"]])
        for p, r in zip(prompts, replies, strict=True)
    ]


def compare(model: str, sampled: list[tuple[list[int], list[int], list[float]]]) -> dict[str, Any]:
    """The distances."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    differences: list[torch.Tensor] = []
    with torch.inference_mode():
        for prompt, reply, logprobs in sampled:
            logits = network(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
            ours = torch.tensor(logprobs, dtype=torch.float64)
            theirs = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(reply)[:, None])[:, 0]
            differences.append(theirs - ours)
    r = torch.cat(differences)
    return {
        "tokens": len(r),
        "max_abs": float(r.abs().max()),
        "mean_abs": float(r.abs().mean()),
        "k3": float((r.expm1() - r).mean()),
    }


def main() -> None:
    """Measures, prints, and with `--write` adds a row to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=256, help="of each reply")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    from claw_train.children import thread_env

    os.environ.update(thread_env(args.threads))  # before torch is imported here
    found = compare(args.model, sample(args))
    print(found)
    if args.write:
        write(RESULTS, {**circumstances("torch", "transformers"), "dtype": args.dtype, **found})


if __name__ == "__main__":
    main()
