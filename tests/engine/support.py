"""Tiny random models on disk, and real server children to speak to."""

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import httpx
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from claw_train.children import thread_env

EOS = 257
VOCAB = 300
KEY = "a-test-key"


def make_model(folder: Path, kind: str, seed: int) -> Path:
    """A random model of some 100 k parameters whose next-token distributions are peaked, with a byte tokenizer."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
        "eos_token_id": EOS,
    }
    if kind == "qwen3":
        config = Qwen3Config(**common, num_key_value_heads=2, head_dim=24, tie_word_embeddings=True)
        model = Qwen3ForCausalLM(config)
    else:
        rope = {"rope_type": "default", "rope_theta": 500.0}
        config = LlamaConfig(**common, num_key_value_heads=1, tie_word_embeddings=False, rope_parameters=rope)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    model.save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    assert tokenizer.token_to_id("<|im_end|>") == EOS
    return tokenizer


def make_adapter(folder: Path, seed: int, *, rank: int = 4, targets: tuple[str, ...] = (), layers: int = 3) -> Path:
    """A PEFT folder with random matrices for `targets` (default: all) of the tiny Qwen3."""
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "self_attn.q_proj": (96, 64),
        "self_attn.k_proj": (48, 64),
        "self_attn.v_proj": (48, 64),
        "self_attn.o_proj": (64, 96),
        "mlp.gate_proj": (96, 64),
        "mlp.up_proj": (96, 64),
        "mlp.down_proj": (64, 96),
    }
    chosen = targets or tuple(shapes)
    tensors = {}
    for layer in range(layers):
        for target in chosen:
            out, inner = shapes[target]
            stem = f"base_model.model.model.layers.{layer}.{target}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inner, generator=g) * 0.1
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, rank, generator=g) * 0.3
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [t.split(".")[1] for t in chosen],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Server:
    """One engine child."""

    def __init__(self, tmp: Path, model: Path, *args: str, env: dict[str, str] | None = None) -> None:
        port_file = tmp / "port"
        environment = {**os.environ, **thread_env(1), "TEST_KEY": KEY, **(env or {})}
        command = [sys.executable, "-m", "claw_train.engine", "--model", str(model), "--port-file", str(port_file)]
        command += ["--dtype", "float32", "--key-env", "TEST_KEY", *args]
        self.log = tmp / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + 60
        while not port_file.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{port_file.read_text()}"
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def ok(self, path: str, **body: object):
        reply = self.post(path, **body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def generate(self, ids, **options):
        """Keyword arguments of `/generate`; sampling parameters are told apart by name."""
        top = {"rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "lora_path", "stream", "priority"}
        sampling = {k: v for k, v in options.items() if k not in top}
        rest = {k: v for k, v in options.items() if k in top}
        return self.ok("/generate", input_ids=ids, sampling_params=sampling, **{"return_logprob": True, **rest})

    def score(self, ids, **options):
        """Log-probabilities of ids[1:]."""
        reply = self.generate(ids, max_new_tokens=0, logprob_start_len=0, **options)
        return torch.tensor([row[0] for row in reply["meta_info"]["input_token_logprobs"][1:]])

    def events(self, ids, **sampling):
        """Server-sent events of a streamed reply; closing the iterator closes the connection."""
        lora = sampling.pop("lora_path", None)
        rid = sampling.pop("rid", None)
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True, "return_logprob": True}
        body |= {"lora_path": lora, "rid": rid}
        with self.http.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])

    def info(self):
        return self.http.get("/server_info").json()

    def wait(self, condition, what: str):
        """Polls `/server_info` until `condition` holds."""
        deadline = time.monotonic() + 30
        while not condition(info := self.info()):
            assert time.monotonic() < deadline, f"{what}: {info}"
            time.sleep(0.01)
        return info

    def close(self) -> None:
        self.http.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=20)


class Reference:
    """The same model in transformers."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if adapter is not None:
            from peft import PeftModel

            with warnings.catch_warnings():  # peft asks transformers for a name it is about to drop
                warnings.simplefilter("ignore", FutureWarning)
                self.model = PeftModel.from_pretrained(self.model, adapter)
        self.model.eval()

    @torch.no_grad()
    def logprobs(self, ids, temperature: float = 1.0) -> torch.Tensor:
        """[len(ids), vocab]: of the token after each position."""
        return torch.log_softmax(self.model(torch.tensor([ids])).logits[0] / temperature, -1)

    def score(self, ids) -> torch.Tensor:
        return self.logprobs(ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
