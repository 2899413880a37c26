"""Serves one model over HTTP with mlx-lm's server: opens the port, then the model, and shows a sample request.

mlx-lm's own server opens any model that a request names: a client that picks the first name of /v1/models would get
the base without the adapter, and "gpt-4" would start a download. Here every name means the one model. The caller
formats chats and sets their stop tokens.
"""

import argparse
import ipaddress
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import APIHandler, ModelProvider, ResponseGenerator, get_system_fingerprint
from mlx_lm.tokenizer_utils import load

from safetrain.core.errors import ConfigError, ModelError, SafetrainError
from safetrain.core.model.files import read_model_files
from safetrain.core.signals import handling, terminate
from safetrain.engine.backend import room_bytes, set_limits
from safetrain.engine.layers import give
from safetrain.engine.upstream.generation import padding_refusal
from safetrain.engine.weight_files import open_tuned

KEPT_PROMPTS = 10  # in the cache for later requests; the oldest is dropped
# Defaults of mlx-lm's command line, for what a request does not set; tests compare the names.
USUAL: dict[str, Any] = {
    "draft_model": None, "num_draft_tokens": 3, "trust_remote_code": False, "chat_template": "",
    "use_default_chat_template": False, "pipeline": False, "chat_template_args": {}, "allowed_origins": (),
    "temp": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "decode_concurrency": 32, "prompt_concurrency": 8,
    "prefill_step_size": 512, "prompt_cache_size": KEPT_PROMPTS, "prompt_cache_bytes": None, "kv_bits": None,
    "kv_group_size": 64, "quantized_kv_start": 0, "adapter_path": None,
}  # fmt: skip
IdsOf = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None, Mapping[str, Any]], list[int]]


@dataclass(frozen=True)
class ServeJob:
    """The model to serve, and the address. ``ids_of`` turns messages, tools and template settings into a prompt."""

    name: str
    folder: Path
    adapter: Path | None
    stop_ids: frozenset[int]
    ids_of: IdsOf
    max_new_tokens: int  # if a request sets none
    host: str
    port: int  # 0: a free one
    stream: bool = False  # the weights stay on disk


def serve_model(job: ServeJob, say: Callable[[str], None]) -> None:
    """Answer requests until Ctrl-C or SIGTERM, which end the process.

    Raises ConfigError if the address is not available, ModelError if the model cannot be used.
    """
    listening, files, room = _listening(job.host, job.port), read_model_files(job.folder), room_bytes()
    set_limits(room)
    kept_bytes = max(0, room - files.static_bytes) // 2  # prompts that are being read need the other half
    host = f"[{job.host}]" if ":" in job.host else job.host
    address, provider = f"http://{host}:{listening.server_port}/v1", OneModel(job)
    try:
        with handling({signal.SIGTERM: terminate}):
            generator = ResponseGenerator(provider, LRUPromptCache(KEPT_PROMPTS, kept_bytes))
            provider.ready.wait()
            if provider.model_key is None:
                generator.stop_and_join()  # mlx-lm has written the traceback of an error that is not ours
                raise provider.error or ModelError("mlx-lm's server cannot open this model.", where=job.name)
            _Handler.job = job
            handler = partial(_Handler, generator, system_fingerprint=get_system_fingerprint())
            listening.RequestHandlerClass = handler
            say(f"{job.name} answers at {address}; Ctrl-C ends it. Try it from another terminal:")
            body = """{"messages": [{"role": "user", "content": "Hello"}]}"""
            say(f"curl -s {address}/chat/completions -H 'Content-Type: application/json' -d '{body}'")
            listening.serve_forever()
    except KeyboardInterrupt:
        say("\nstopped")
        sys.stdout.flush()
        os._exit(0)  # else a prompt would be read to its end, and mlx 0.32.4 aborts after requests in its own threads
    finally:
        listening.server_close()


class OneModel(ModelProvider):
    """Opens the model in the thread that computes, and returns it for every name."""

    def __init__(self, job: ServeJob) -> None:
        super().__init__(argparse.Namespace(**USUAL, model=str(job.folder), max_tokens=job.max_new_tokens))
        self._job, self.ready = job, Event()
        self.error: SafetrainError | None = None

    def load_default(self) -> None:
        """Open the model; an error is kept for the waiting thread."""
        try:
            self.model = open_tuned(self._job.folder, self._job.adapter, stream=self._job.stream).module
            self.tokenizer = _tokenizer_of(self._job)
            self.is_batchable = not padding_refusal(self.model)
            self.model_key = (self._job.name, None, None)
        except SafetrainError as error:
            self.error = error
        finally:
            self.ready.set()

    def load(self, *_names: object) -> tuple[Any, Any]:
        """Return the model, whatever its name in the request."""
        return self.model, self.tokenizer


def _tokenizer_of(job: ServeJob) -> Any:
    """mlx-lm's tokenizer with the job's chat format and stop tokens."""
    tokenizer = load(job.folder, {"trust_remote_code": False, "local_files_only": True})
    tokenizer.eos_token_ids = job.stop_ids
    tokenizer.has_chat_template = True  # ``ids_of`` works without a template too

    def write(
        _self: Any, messages: Any, tools: Any = None, tokenize: bool = True, add_generation_prompt: bool = True,
        **settings: Any,
    ) -> list[int]:  # fmt: skip
        return job.ids_of(messages, tools, settings)

    give(tokenizer, {"apply_chat_template": write})
    return tokenizer


class _Handler(APIHandler):
    """Answers requests for the one model."""

    job: ServeJob

    def parse_request(self) -> bool:
        """Refuse foreign Host headers; otherwise a web page could read answers by DNS rebinding."""
        is_read = bool(super().parse_request())
        if is_read and not may_name(self.headers.get("Host", ""), self.job.host):
            self.send_error(403, "Forbidden", "The Host header names another machine. Use an IP address or localhost.")
            return False
        return is_read

    def handle_models_request(self) -> None:
        """List the one model; mlx-lm's server lists the hub's cache, and fails without one."""
        model = {"id": self.job.name, "object": "model", "created": self.created, "owned_by": "safetrain"}
        content = json.dumps({"object": "list", "data": [model]}).encode()
        self._set_completion_headers(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _set_completion_headers(self, status_code: int = 200) -> None:
        """Send 400, not mlx-lm's 404, for an invalid prompt: clients take 404 for a wrong address."""
        is_ours = self.command == "POST" and self.path.endswith("/completions")
        super()._set_completion_headers(400 if status_code == 404 and is_ours else status_code)


def may_name(header: str, host: str) -> bool:
    """Whether a Host header is empty, an IP address, localhost, or ``host``, the name that was chosen with --host."""
    try:
        name = urlsplit(f"//{header}").hostname or ""
        if name in ("", "localhost", host.lower()):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Listening(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect during an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _listening(host: str, port: int) -> _Listening:
    """Open the port; clients wait until the handler is set. Raises ConfigError if the address is not available."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        _Listening.address_family = family
        return _Listening((str(address[0]), port), APIHandler)
    except OSError as error:
        raise ConfigError(
            f"Nothing can be served at this address: {error.strerror or error}.",
            where=f"{host}:{port}",
            expected="a free port above 1023; 127.0.0.1 for clients on this machine, 0.0.0.0 for clients anywhere",
            do="choose them with --host and --port",
        ) from None
