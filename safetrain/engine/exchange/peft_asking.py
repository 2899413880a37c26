"""Asks PyTorch and PEFT, in a process of their own, what they make of an exported adapter."""

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.errors import ModelError
from safetrain.core.memory.terms import FLOAT32
from safetrain.engine.effect import PLACE_BITS, Reference, Seen, compared

CONSUMER = "safetrain.engine.exchange.peft_consumer"
MOST_LOGITS_BYTES = 2**27  # that are asked for at once
LAST_WORDS = 400  # of what a process said that failed


@dataclass(frozen=True, eq=False)
class PeftLogits:
    """What PEFT computes at every label, who computed it, and the most that a logit differs from the reference's."""

    seen: Seen
    opened_by: str
    largest_difference: float


def missing_packages() -> tuple[str, ...]:
    """What PEFT's own reading needs and this environment has not."""
    return tuple(name for name in ("torch", "peft") if importlib.util.find_spec(name) is None)


def ask_peft(base: Path, adapter: Path, rows: TokenRows, reference: Reference) -> PeftLogits:
    """What PEFT computes with ``adapter`` on the float model in ``base``, at the labels of ``rows``.

    Raises ModelError where it opens or computes nothing, with its last words.
    """
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-m", CONSUMER, str(base.resolve()), str(adapter.resolve())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said) as started:
            process: Any = started  # its pipes are there
            try:
                return _asked(process.stdin, process.stdout, rows, reference)
            except (OSError, ValueError) as error:
                process.kill()
                process.wait()
                said.seek(0)
                words = said.read().decode("utf-8", "replace").strip()
                raise ModelError(
                    "PEFT does not open the exported adapter on this base.",
                    where=str(base),
                    got=words[-LAST_WORDS:] or str(error),
                    do="safetrain fuse OUT makes one model of base and adapter",
                ) from error
            finally:
                process.kill()  # a Ctrl-C too leaves nothing behind
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()


def _asked(asking: IO[bytes], answers: IO[bytes], rows: TokenRows, reference: Reference) -> PeftLogits:
    made = json.loads(answers.readline() or b"null")
    if made is None:
        raise ValueError("it ended before it had opened anything")
    vocabulary, most = made["vocabulary"], 0.0
    head, keys = reference.head(), reference.seen.keys
    found: list[tuple[np.ndarray, ...]] = []
    size = max(1, MOST_LOGITS_BYTES // (FLOAT32 * vocabulary))
    for number in np.unique(keys >> PLACE_BITS):
        first, last = np.searchsorted(keys, [number << PLACE_BITS, (number + 1) << PLACE_BITS]).tolist()
        ids = rows[int(number) - 1].ids
        for start in range(first, last, size):
            some = slice(start, min(start + size, last))
            places = keys[some] & (2**PLACE_BITS - 1)
            _write(asking, {"ids": ids[:-1].tolist(), "places": places.tolist()})
            theirs = _read(answers, len(places), vocabulary)
            ours = head(mx.array(reference.states[some])).astype(mx.float32)
            most = max(most, float(np.array(mx.abs(ours - theirs).max())))
            found.append(compared(ours, theirs, ids[places + 1]))
    losses, greedy, right, divergences = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return PeftLogits(Seen(keys, losses, greedy, right, divergences), made["opened_by"], most)


def _write(asking: IO[bytes], value: dict[str, Any]) -> None:
    asking.write(json.dumps(value).encode() + b"\n")
    asking.flush()


def _read(answers: IO[bytes], labels: int, vocabulary: int) -> mx.array:
    """Logits (labels, vocabulary); raises ValueError where fewer come."""
    content = answers.read(FLOAT32 * labels * vocabulary)
    return mx.array(np.frombuffer(content, dtype=np.float32).reshape(labels, vocabulary))
