"""Tokens per second of the embedded engine against `model.generate` and, if asked, vLLM, on the same requests.

    python benchmarks/engine_throughput.py --model DIR [--vllm-python PATH] [--runs 3] [--write]

128 requests, prompts of 32-512 and replies of 8-256 tokens, both log-uniform, random ids, temperature 1, end tokens
ignored. Each arm is a process of its own with the same threads and passive waiting; all load first, then take turns,
so that other work on the machine hits them alike. `generate` gets its best setting on a CPU: bf16, static cache, no
compilation, batches of 32 that are sorted by reply length. Only tokens that were asked for count. The engine is
spoken to over HTTP, as in a run.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

Request = tuple[list[int], int]
"""(prompt ids, tokens to generate)"""
RESULTS = Path(__file__).parent / "results" / "engine_throughput.json"
MARK = "RESULT "


def workload(seed: int, count: int, vocab: int) -> list[Request]:
    """The requests of one seed."""
    rng = random.Random(seed)

    def log_uniform(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    sizes = [(log_uniform(32, 512), log_uniform(8, 256)) for _ in range(count)]
    return [([rng.randrange(vocab) for _ in range(prompt)], reply) for prompt, reply in sizes]


# ---- arms: each reads lines of requests and answers with seconds


def serve_generate(args: argparse.Namespace) -> None:
    """`model.generate`, in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    config = model.generation_config
    config.eos_token_id, config.pad_token_id = None, 0

    def run(requests: list[Request]) -> None:
        ordered = sorted(requests, key=lambda r: r[1])
        for i in range(0, len(ordered), args.batch):
            batch = ordered[i : i + args.batch]
            width = max(len(p) for p, _ in batch)
            ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch])
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(n for _, n in batch),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                cache_implementation="static",
                disable_compile=True,
            )

    with torch.inference_mode():
        _answer(run)


def serve_vllm(args: argparse.Namespace) -> None:
    """The offline engine of vLLM, in this process; run by an interpreter that has it."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(model=args.model, dtype="bfloat16", max_model_len=2048, seed=args.seed)

    def run(requests: list[Request]) -> None:
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        sampling = [
            SamplingParams(max_tokens=n, ignore_eos=True, temperature=1.0, detokenize=False) for _, n in requests
        ]
        engine.reset_prefix_cache()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        assert sum(len(o.outputs[0].token_ids) for o in outputs) == sum(n for _, n in requests)

    _answer(run)


def _answer(run: Any) -> None:
    """Runs each line's requests and prints how long they took."""
    print(MARK + "ready", flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        run([(ids, n) for ids, n in json.loads(line)])
        print(MARK + str(time.perf_counter() - started), flush=True)


class Worker:
    """An arm that is a copy of this script."""

    def __init__(self, python: str, arm: str, args: argparse.Namespace, env: dict[str, str]) -> None:
        command = [python, __file__, "--serve", arm, "--model", args.model, "--batch", str(args.batch)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
            start_new_session=True,
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return line.removeprefix(MARK).strip()
        raise SystemExit(f"an arm ended with status {self._process.wait()}")

    def run(self, requests: list[Request]) -> float:
        """Seconds for all of them."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """Ends the process and what it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Engine:
    """The embedded engine, over HTTP."""

    def __init__(self, model: str, env: dict[str, str], *options: str) -> None:
        import httpx

        with tempfile.TemporaryDirectory() as folder:
            port_file = Path(folder) / "port"
            command = [sys.executable, "-m", "claw_train.engine", "--model", model, "--port-file", str(port_file)]
            self._process = subprocess.Popen([*command, *options], stdin=subprocess.PIPE, env={**os.environ, **env})
            while not port_file.exists():
                if self._process.poll() is not None:
                    raise SystemExit("the engine did not start")
                time.sleep(0.05)
            self.http = httpx.Client(base_url=f"http://127.0.0.1:{port_file.read_text()}", timeout=3600)

    def post(self, path: str, **body: object) -> Any:
        """The reply to one call."""
        reply = self.http.post(path, json=body)
        reply.raise_for_status()
        return reply.json()

    def info(self) -> dict[str, Any]:
        """What the server says of itself; resets its longest gap."""
        return self.http.get("/server_info").json()

    def run(self, requests: list[Request]) -> float:
        """Seconds for all of them."""
        self.post("/flush_cache")
        body = {
            "input_ids": [ids for ids, _ in requests],
            "sampling_params": [{"max_new_tokens": n, "ignore_eos": True} for _, n in requests],
            "return_logprob": True,
        }
        started = time.perf_counter()
        replies = self.post("/generate", **body)
        seconds = time.perf_counter() - started
        assert [len(r["output_ids"]) for r in replies] == [n for _, n in requests]
        return seconds

    def close(self) -> None:
        """Ends the server."""
        self.http.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@contextlib.contextmanager
def arms(args: argparse.Namespace) -> Iterator[dict[str, Worker | Engine]]:
    """Every arm, loaded."""
    from claw_train.children import thread_env

    env = thread_env(args.threads)
    running: dict[str, Worker | Engine] = {}
    try:
        running["engine"] = Engine(args.model, env, "--dtype", "bfloat16", "--max-running", str(args.running))
        running["generate"] = Worker(sys.executable, "generate", args, env)
        if args.vllm_python:
            cores = ",".join(str(c) for c in sorted(os.sched_getaffinity(0))[: args.threads])
            running["vllm"] = Worker(
                args.vllm_python,
                "vllm",
                args,
                {**env, "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"},
            )
        yield running
    finally:
        for arm in running.values():
            arm.close()


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of each arm, run by run."""
    requests = workload(args.seed, args.requests, vocab=49152)
    tokens = sum(n for _, n in requests)
    rates: dict[str, list[float]] = {}
    with arms(args) as running:
        for arm in running.values():
            arm.run(requests[:4])
        for _ in range(args.runs):
            for name, arm in running.items():
                rates.setdefault(name, []).append(tokens / arm.run(requests))
                print(f"{name:10} {rates[name][-1]:8.1f} tokens/s   load {os.getloadavg()[0]:.1f}", flush=True)
    return rates


def circumstances(*packages: str) -> dict[str, Any]:
    """What every record of a benchmark says."""
    from claw_train.run_folder import git_commit, processor

    return {
        "command": "python " + " ".join(sys.argv),
        "commit": git_commit(),
        "hardware": processor(),
        "versions": {name: version(name) for name in packages},
        "load_average": round(os.getloadavg()[0], 1),
    }


def write(path: Path, record: dict[str, Any]) -> None:
    """Adds a record to a results file."""
    rows = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*rows, record], indent=2) + "\n")


def summary(args: argparse.Namespace, rates: dict[str, list[float]]) -> dict[str, Any]:
    """The record of these runs."""
    ours = rates["engine"]
    return {
        **circumstances("torch", "transformers"),
        "seed": args.seed,
        "requests": args.requests,
        "batch": {"generate": args.batch, "engine": args.running},
        "threads": args.threads,
        "tokens_per_s": {name: [round(r, 1) for r in runs] for name, runs in rates.items()},
        "median_tokens_per_s": {name: round(statistics.median(runs), 1) for name, runs in rates.items()},
        "median_ratio_of_paired_runs": {
            f"engine/{name}": round(statistics.median(a / b for a, b in zip(ours, runs, strict=True)), 2)
            for name, runs in rates.items()
            if name != "engine"
        },
    }


def main() -> None:
    """Measures, prints, and with `--write` adds a row to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vllm-python", help="an interpreter that has vllm-cpu")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--running", type=int, default=32, help="requests the engine decodes at once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--serve", choices=["generate", "vllm"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        {"generate": serve_generate, "vllm": serve_vllm}[args.serve](args)
        return
    record = summary(args, measure(args))
    for name, rate in record["median_tokens_per_s"].items():
        print(f"{name:10} {rate:8.1f} tokens/s (median of {args.runs})")
    print(record["median_ratio_of_paired_runs"])
    if args.write:
        write(RESULTS, record)


if __name__ == "__main__":
    main()
