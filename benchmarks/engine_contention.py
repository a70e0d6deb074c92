"""What the engine and a training loop cost each other when each has one thread.

    python benchmarks/engine_contention.py --model DIR [--rounds 5] [--write]

Rounds of: the engine alone, the loop alone, both at once. The engine generates a fixed batch over HTTP; the loop runs
forward and backward passes of the same model under bf16 autocast. Each has the environment that the launcher gives a
child with one thread. Reported is the median over rounds of (rate together / rate alone in the same round).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from engine_throughput import Engine, circumstances, write

RESULTS = Path(__file__).parent / "results" / "engine_contention.json"


def serve_loop(model: str) -> None:
    """The training loop, in this process: `start` and `stop` on standard input; `stop` prints when steps ended."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.randint(0, network.config.vocab_size, (2, 64))
    running = threading.Event()
    ends: list[float] = []

    def loop() -> None:
        while running.wait():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = network(ids, labels=ids).loss
            loss.backward()
            network.zero_grad(set_to_none=False)
            ends.append(time.monotonic())

    threading.Thread(target=loop, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "start":
            ends.clear()
            running.set()
        else:
            running.clear()
            print(json.dumps(ends), flush=True)


class Loop:
    """The training loop as a child."""

    def __init__(self, model: str, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--model", model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._out.readline()

    def start(self) -> None:
        """Begins to step."""
        self._in.write("start\n")
        self._in.flush()

    def stop(self, since: float, until: float) -> float:
        """Steps a second between two times; only whole steps inside count."""
        self._in.write("stop\n")
        self._in.flush()
        inside = [t for t in json.loads(self._out.readline()) if since <= t <= until]
        return (len(inside) - 1) / (inside[-1] - inside[0])

    def close(self) -> None:
        """Ends the child."""
        self._in.close()
        self._process.wait(timeout=60)


def generate(engine: Engine, args: argparse.Namespace) -> tuple[float, float]:
    """(start, end) of one batch."""
    rng = random.Random(0)
    prompts = [[rng.randrange(49152) for _ in range(64)] for _ in range(args.batch)]
    started = time.monotonic()
    engine.post("/generate", input_ids=prompts, sampling_params={"max_new_tokens": args.tokens, "ignore_eos": True})
    return started, time.monotonic()


def measure(args: argparse.Namespace, engine: Engine, loop: Loop) -> dict[str, list[float]]:
    """Rates of every round."""
    rates: dict[str, list[float]] = {name: [] for name in ("engine", "engine_both", "loop", "loop_both")}
    tokens = args.batch * args.tokens
    generate(engine, args)
    for _ in range(args.rounds):
        start, end = generate(engine, args)
        rates["engine"].append(tokens / (end - start))
        loop.start()
        began = time.monotonic()
        time.sleep(end - start)
        rates["loop"].append(loop.stop(began, time.monotonic()))
        loop.start()
        start, end = generate(engine, args)
        rates["loop_both"].append(loop.stop(start, end))
        rates["engine_both"].append(tokens / (end - start))
        print({k: round(v[-1], 2) for k, v in rates.items()}, f"load {os.getloadavg()[0]:.1f}", flush=True)
    return rates


def main() -> None:
    """Measures, prints, and with `--write` adds a row to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="of each reply")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_loop(args.model)
        return
    from claw_train.children import thread_env

    engine = Engine(args.model, thread_env(1), "--dtype", "bfloat16")
    loop = Loop(args.model, thread_env(1))
    try:
        rates = measure(args, engine, loop)
    finally:
        loop.close()
        engine.close()
    kept = {
        name: round(statistics.median(b / a for a, b in zip(rates[name], rates[f"{name}_both"], strict=True)), 3)
        for name in ("engine", "loop")
    }
    print(f"kept when both run (median of {args.rounds} rounds): {kept}")
    if args.write:
        rounded = {k: [round(r, 3) for r in v] for k, v in rates.items()}
        write(RESULTS, {**circumstances("torch", "transformers"), "kept": kept, "tokens_or_steps_per_s": rounded})


if __name__ == "__main__":
    main()
