"""mlx-lm's HTTP server, with one model that this engine has opened.

By itself it opens whatever a request names: a client that takes the first name of /v1/models would talk with the base,
without the adapter, and one that says "gpt-4" would start a download. Here every name means the one model. Chats are
written by the caller, and stop where the caller says.
"""

import argparse
import ipaddress
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.server import APIHandler, ModelProvider, ResponseGenerator, get_system_fingerprint

from safetrain.core.errors import ModelError, SafetrainError
from safetrain.engine.layers import give

# What mlx-lm's own command line has as defaults, where a request does not say: tests compare the names.
USUAL: dict[str, Any] = {
    "draft_model": None, "num_draft_tokens": 3, "trust_remote_code": False, "chat_template": "",
    "use_default_chat_template": False, "pipeline": False, "chat_template_args": {}, "allowed_origins": (),
    "temp": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "decode_concurrency": 32, "prompt_concurrency": 8,
    "prefill_step_size": 512, "prompt_cache_size": 10, "prompt_cache_bytes": None, "kv_bits": None,
    "kv_group_size": 64, "quantized_kv_start": 0, "adapter_path": None,
}  # fmt: skip
STOP_SECONDS = 3.0
IdsOf = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None, Mapping[str, Any]], list[int]]


@dataclass(frozen=True)
class ServedModel:
    """The model that answers. ``ids_of`` writes messages, tools and a template's settings as the ids of a prompt."""

    name: str
    folder: Path  # of the tokenizer
    stop_ids: frozenset[int]
    ids_of: IdsOf
    max_new_tokens: int  # where a request does not say


class OneModel(ModelProvider):
    """Opens the model in the thread that computes, and returns it for every name."""

    def __init__(
        self, served: ServedModel, cache_bytes: int, open_model: Callable[[], Any], *, batches: Callable[[Any], bool]
    ) -> None:
        """``cache_bytes``: of kept prompts. ``open_model`` gives mlx-lm's module.

        ``batches``: whether requests may be computed together.
        """
        own = {"model": str(served.folder), "max_tokens": served.max_new_tokens, "prompt_cache_bytes": cache_bytes}
        arguments = argparse.Namespace(**{**USUAL, **own})
        super().__init__(arguments)
        self._served, self._open, self._batches = served, open_model, batches
        self.ready = Event()
        self.error: SafetrainError | None = None

    def load_default(self) -> None:
        """Open it; what goes wrong is kept for the thread that waits."""
        try:
            self.model = self._open()
            self.tokenizer = _tokenizer_of(self._served)
            mergeable = all(hasattr(cache, "merge") for cache in make_prompt_cache(self.model))
            self.is_batchable = mergeable and self._batches(self.model)
            self.model_key = (self._served.name, None, None)
        except SafetrainError as error:
            self.error = error
        finally:
            self.ready.set()

    def load(self, *_names: object) -> tuple[Any, Any]:
        """The one model."""
        return self.model, self.tokenizer


def _tokenizer_of(served: ServedModel) -> Any:
    """mlx-lm's tokenizer, which writes chats as ``served`` does."""
    from mlx_lm.tokenizer_utils import load

    tokenizer = load(served.folder, {"trust_remote_code": False, "local_files_only": True})
    tokenizer.eos_token_ids = served.stop_ids
    tokenizer.has_chat_template = True  # ``ids_of`` takes texts without one, too

    def write(
        _self: Any, messages: Any, tools: Any = None, tokenize: bool = True, add_generation_prompt: bool = True,
        **settings: Any,
    ) -> list[int]:  # fmt: skip
        return served.ids_of(messages, tools, settings)

    give(tokenizer, {"apply_chat_template": write})
    return tokenizer


class _Handler(APIHandler):
    """Answers requests for the one model."""

    def __init__(self, name: str, host: str, *arguments: Any, **keywords: Any) -> None:
        self._name, self._host = name, host
        super().__init__(*arguments, **keywords)

    def parse_request(self) -> bool:
        """Refuse a Host header of another name: a web page whose name leads here (DNS rebinding) could read answers."""
        if not super().parse_request():
            return False
        if may_name(self.headers.get("Host", ""), self._host):
            return True
        self.send_error(403, "Forbidden", "The Host header names another machine. Use an IP address or localhost.")
        return False

    def handle_models_request(self) -> None:
        """The one model; mlx-lm's own lists the hub's cache, and fails without one."""
        model = {"id": self._name, "object": "model", "created": self.created, "owned_by": "safetrain"}
        one = self.path.rstrip("/").count("/") > 2  # /v1/models/NAME
        content = json.dumps(model if one else {"object": "list", "data": [model]}).encode()
        self._set_completion_headers(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _set_completion_headers(self, status_code: int = 200) -> None:
        """A prompt that cannot be made is 404 in mlx-lm, which clients take for a wrong address."""
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


class ServerSocket(ThreadingHTTPServer):
    """A port that is bound, but not yet listened to."""

    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError where the port cannot be had."""
        import socket

        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = addresses[0][0]
        self.asked_host = host
        super().__init__((str(addresses[0][4][0]), port), _Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except OSError:
            self.server_close()
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may leave in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def server_bind(self) -> None:
        """As of any server, without asking for the name of this machine, which can take long."""
        import socketserver

        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


def kept_prompts(provider: OneModel) -> LRUPromptCache:
    """Where prompts are kept for the next request; the oldest is dropped. mlx-lm's own server counts only prompts."""
    return LRUPromptCache(provider.cli_args.prompt_cache_size, provider.cli_args.prompt_cache_bytes)


def serve(listening: ServerSocket, provider: OneModel, name: str, ready: Callable[[], None]) -> None:
    """Open the model, call ``ready``, and answer until a KeyboardInterrupt. Its threads may outlive it for a while.

    Raises SafetrainError where the model cannot be opened.
    """
    generator = ResponseGenerator(provider, kept_prompts(provider))
    try:
        provider.ready.wait()
        if provider.error is not None:
            raise provider.error
        if provider.model_key is None:  # mlx-lm has written the traceback
            raise ModelError("mlx-lm's server cannot open this model.", where=name, do="try safetrain chat")
        listening.RequestHandlerClass = partial(
            _Handler, name, listening.asked_host, generator, system_fingerprint=get_system_fingerprint()
        )
        listening.server_activate()
        ready()
        listening.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        listening.server_close()
        generator._stop = True
        generator._generation_thread.join(STOP_SECONDS)
