"""Serves one model over HTTP: the port first, then the model, then a line that says how to ask it."""

import errno
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.errors import ConfigError
from safetrain.core.memory.terms import FLOAT32
from safetrain.core.model.files import read_model_files
from safetrain.core.signals import handling
from safetrain.engine.backend import room_bytes, set_limits
from safetrain.engine.conversation import open_tuned
from safetrain.engine.model import BaseModel, dequantize_to_answer
from safetrain.engine.upstream.generation import padding_refusal
from safetrain.engine.upstream.serving import OneModel, ServedModel, ServerSocket, serve

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # where this machine reaches itself
TAKEN, REFUSED = (errno.EADDRINUSE,), (errno.EACCES, errno.EPERM)
CONNECT_SECONDS = 1.0


@dataclass(frozen=True)
class ServeJob:
    """The model to serve, and the address."""

    served: ServedModel
    base: Path
    adapter: Path | None
    host: str
    port: int  # 0: a free one


def serve_model(job: ServeJob, say: Callable[[str], None]) -> None:
    """Answer requests until Ctrl-C or SIGTERM, which end the process.

    Raises ConfigError for an address that cannot be had, and ModelError.
    """
    listening = _listening(job.host, job.port)
    host, port = ANY_ADDRESS.get(job.host, job.host), listening.server_port
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def open_model() -> BaseModel:
        return open_tuned(job.base, job.adapter).module

    def ready() -> None:
        say(f"{job.served.name} answers at {address}; Ctrl-C ends it. Try it from another terminal:")
        say(curl_line(address))

    provider = OneModel(job.served, _cache_bytes(job), open_model, batches=lambda module: not padding_refusal(module))
    with handling({signal.SIGTERM: _interrupt}):
        serve(listening, provider, job.served.name, ready)
    say("\nstopped")
    sys.stdout.flush()
    os._exit(0)  # else a long prompt would be read to its end, and mlx 0.32.4 aborts after requests in its own threads


def _cache_bytes(job: ServeJob) -> int:
    """By what mlx may take here now, which it is then limited to."""
    files, room = read_model_files(job.base), room_bytes()
    set_limits(room)
    weights = FLOAT32 * files.parameters if dequantize_to_answer(files) else files.static_bytes
    return served_cache_bytes(weights, room)


def served_cache_bytes(weight_bytes: int, room_bytes: int) -> int:
    """For keys and values of a server's prompts and answers: half of what ``weight_bytes`` leave of ``room_bytes``.

    The other half is for a prompt that is read, and for buffers that mlx keeps.
    """
    return max(0, room_bytes - weight_bytes) // 2


def curl_line(address: str) -> str:
    """A request, to be pasted into a shell."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})
    return f"curl -s {shlex.quote(f'{address}/chat/completions')} -H 'Content-Type: application/json' -d '{body}'"


def _interrupt(_number: int) -> None:
    raise KeyboardInterrupt


def _listening(host: str, port: int) -> ServerSocket:
    where = f"{host}:{port}"
    try:
        # On a Mac two programs can have one port, if one of them has it for all addresses, so that is checked too.
        if port and _answers(ANY_ADDRESS.get(host, host), port):
            raise OSError(errno.EADDRINUSE, "something answers there")
        return ServerSocket(host, port)
    except OSError as error:
        if error.errno in TAKEN:
            do = f"choose another with --port {port + 1 if port < 65535 else 8080}, or end the other program"
            raise ConfigError("The port is in use.", where=where, do=do) from None
        if error.errno in REFUSED:
            raise ConfigError(
                f"This port may not be used: {error.strerror}.", where=where, do="choose one above 1023 with --port"
            ) from None
        raise ConfigError(
            f"Nothing can be served at this address: {error.strerror or error}.",
            where=where,
            expected="an address of this machine: 127.0.0.1 for itself, 0.0.0.0 for all who reach it",
            do="choose it with --host",
        ) from None


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
