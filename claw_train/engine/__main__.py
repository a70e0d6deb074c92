"""`python -m claw_train.engine`: serves one model until its parent is gone.

In: a model folder and limits on the command line, the key in the environment. Out: an HTTP server; its port is
written to `--port-file` once requests can be sent. A taken port, a bad folder or a bad value is one line on standard
error and exit code 2.
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from claw_train.children import watch_parent
from claw_train.engine.spec import read_spec
from claw_train.errors import ConfigError, ModelError
from claw_train.log import setup_logging

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server; returns the exit code."""
    args = _parser().parse_args(argv)
    watch_parent()
    setup_logging()
    try:
        key = os.environ.get(args.key_env) if args.key_env else None
        if args.host not in _LOOPBACK and not key:
            raise ConfigError(f"--host {args.host} is not loopback: set a key in the variable named by --key-env")
        spec = read_spec(args.model)
        if args.context is not None and args.context > spec.context:
            raise ConfigError(f"--context {args.context} is above the model's {spec.context}")
        with _bind(args.host, args.port) as sock:
            _serve(args, sock, key)
    except (ConfigError, ModelError) as error:
        print(f"engine: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m claw_train.engine", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--port-file", type=Path, help="where the port is written once requests can be sent")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--max-running", type=_positive, default=32, help="requests decoded at once")
    parser.add_argument("--max-total-tokens", type=_positive, default=65536, help="tokens of keys and values")
    parser.add_argument("--context", type=_positive, help="longest sequence; default is the model's")
    parser.add_argument("--key-env", default="", help="environment variable that holds the API key")
    parser.add_argument("--weight-version", default="base")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-lora-rank", type=_positive, default=64)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"--port {port} on {host} cannot be used: {error.strerror}; choose another or 0") from None
    return sock


def _serve(args: argparse.Namespace, sock: socket.socket, key: str | None) -> None:
    # torch and the web framework take seconds to import: only once the arguments are known to be good
    import uvicorn

    from claw_train.engine.access import Access
    from claw_train.engine.build import build_parts
    from claw_train.engine.routes import make_app

    parts = build_parts(
        model=args.model,
        dtype_name=args.dtype,
        device_name=args.device,
        max_running=args.max_running,
        max_total_tokens=args.max_total_tokens,
        context=args.context,
        version=args.weight_version,
        seed=args.seed,
        max_rank=args.max_lora_rank,
    )
    app = Access(make_app(parts), key)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=5)
    sock.listen(config.backlog)
    if args.port_file is not None:
        _write_port(args.port_file, sock.getsockname()[1])
    uvicorn.Server(config).run(sockets=[sock])


def _write_port(path: Path, port: int) -> None:
    try:
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(str(port))
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"--port-file {path} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
