"""How long running requests wait when weights are exchanged.

    python benchmarks/engine_swap.py --model DIR [--rounds 5] [--write]

While 16 requests decode, an adapter (rank 16, all matrices) is loaded, and the whole model is replaced from disk. The
engine reports the longest time between the ends of two passes, with and without an exchange.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from engine_throughput import Engine, circumstances, write

RESULTS = Path(__file__).parent / "results" / "engine_swap.json"
RANK = 16


def make_adapter(model: Path, folder: Path) -> None:
    """A random adapter for every matrix of the model's layers."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    with safe_open(model / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            if "_proj.weight" in name:
                out, inner = file.get_slice(name).get_shape()
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, inner) * 0.01
                tensors[f"{stem}.lora_B.weight"] = torch.randn(out, RANK) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def gap_ms(engine: Engine, action: Mapping[str, str] | None) -> tuple[float, float]:
    """(longest gap, seconds of the call) around one exchange, or one second of plain decoding."""
    engine.info()
    started = time.perf_counter()
    if action is None:
        time.sleep(1)
    else:
        engine.post(**action)
    seconds = time.perf_counter() - started
    # let the pass after the exchange end too
    passes = engine.http.get("/server_info").json()
    longest = passes["longest_gap_s"]
    target = passes["passes"] + 2
    while (info := engine.info())["passes"] < target:
        longest = max(longest, info["longest_gap_s"])
        time.sleep(0.005)
    return 1000 * max(longest, info["longest_gap_s"]), seconds


def measure(args: argparse.Namespace, engine: Engine, adapter: Path) -> dict[str, list[float]]:
    """Milliseconds of every round."""
    found: dict[str, list[float]] = {}
    for i in range(args.rounds):
        load = {"path": "/load_lora_adapter", "lora_name": f"a-{i}", "lora_path": str(adapter)}
        update = {"path": "/update_weights_from_disk", "model_path": args.model, "weight_version": f"v{i}"}
        for name, action in (("none", None), ("adapter", load), ("full", update)):
            gap, seconds = gap_ms(engine, action)
            found.setdefault(f"{name}_gap_ms", []).append(round(gap, 1))
            found.setdefault(f"{name}_call_ms", []).append(round(1000 * seconds, 1))
        engine.post("/unload_lora_adapter", lora_name=f"a-{i}")
    return found


def main() -> None:
    """Measures, prints, and with `--write` adds a row to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    from claw_train.children import thread_env

    engine = Engine(args.model, thread_env(args.threads), "--dtype", "bfloat16")
    body = {"input_ids": [[i + 1] * 64 for i in range(16)], "rid": "load"}
    body["sampling_params"] = {"max_new_tokens": 3900, "ignore_eos": True}
    traffic = threading.Thread(target=lambda: engine.post("/generate", **body))
    with tempfile.TemporaryDirectory() as folder:
        make_adapter(Path(args.model), Path(folder))
        traffic.start()
        try:
            while engine.info()["num_running"] < 16:
                time.sleep(0.05)
            found = measure(args, engine, Path(folder))
        finally:
            engine.post("/abort_request", abort_all=True)
            traffic.join()
            engine.close()
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(medians)
    if args.write:
        write(RESULTS, {**circumstances("torch"), "median": medians, "rounds": found})


if __name__ == "__main__":
    main()
