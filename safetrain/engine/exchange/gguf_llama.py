"""What llama.cpp itself makes of a GGUF file, beside the training's tokenizer, template and tuned model."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from safetrain.core.data.template import TemplateError
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import ModelError
from safetrain.core.memory.terms import FLOAT32
from safetrain.core.records.adapter_files import Taught
from safetrain.core.records.exporting import LlamaCpp
from safetrain.engine.effect import PLACE_BITS, Reference, Seen, compared, likeness

MOST_TOKENS, MOST_TEXTS, MOST_LOGIT_BYTES = 512, 256, 2**28
LABELS_AT_ONCE = 64
SHOWN = 80  # characters of a text
FAILURES = {  # by the last step that the worker began
    "open": "llama.cpp cannot open the file that was written.",
    "split": "llama.cpp opens the file that was written, and cannot split texts with its tokenizer.",
    "compute": "llama.cpp opens the file that was written, and cannot compute with it.",
    "render": "The chat template of the file that was written cannot be rendered by llama-cpp-python.",
}
ABSENT = (
    "llama.cpp itself was not asked: pip install -e '.[llama]' builds it (some minutes), then export again to compare"
)
SYSTEM, USER, ASSISTANT = "Answer in one word.", "Qual é a capital de Portugal? 你好 🙂", "Lisboa."
CHATS = tuple(
    [{"role": role, "content": text} for role, text in turns]
    for turns in (
        (("user", USER),),
        (("system", SYSTEM), ("user", USER)),
        (("user", USER), ("assistant", ASSISTANT), ("user", "  Two spaces\nand a line, 1234567?")),
    )
)


@dataclass(frozen=True, eq=False)
class Request:
    """Rows to compute, and the places of their labels: of the tuned model's ``Seen``, those at ``chosen``."""

    ids: np.ndarray  # (tokens,) of all rows
    lengths: np.ndarray  # (rows,)
    chosen: np.ndarray  # (labels,) which of the tuned model's labels
    rows: np.ndarray  # (labels,) the row of each, from 0
    places: np.ndarray  # (labels,) the token that it is predicted from
    targets: np.ndarray  # (labels,)


def ask_llama(
    file: Path,
    rows: TokenRows,
    reference: Reference,
    tokenizer: ChatTokenizer,
    taught: Taught | None,
    say: Callable[[str], None],
    *,
    explains: Callable[[str], bool],
    may_differ: bool,
) -> LlamaCpp | None:
    """Split texts, render conversations and compute some of the rows; None where llama.cpp is not installed.

    ``explains``: whether a known difference can be why a text is split otherwise. Raises ModelError where llama.cpp
    cannot do one of these; and, unless it ``may_differ``, where it splits or renders otherwise without that.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        say(ABSENT)
        return None
    request = _request(rows, reference.seen)
    texts = [tokenizer.spell(rows[number].ids.tolist()) for number in range(min(len(rows), MOST_TEXTS))]
    chats = [(chat, prompt) for chat in CHATS if (prompt := _rendered(tokenizer, taught, chat)) is not None]
    logits, answer = _ask(file, request, texts, [chat for chat, _ in chats])
    splits = [tokenizer.encode_chat(text) for text in texts]
    other = [text for text, ours, its in zip(texts, splits, answer["tokens"], strict=True) if ours != its]
    odd = [text for text in other if not explains(text)]
    other_chats = [prompt for (_, prompt), its in zip(chats, answer["chats"], strict=True) if prompt != its]
    found = likeness(_seen(logits, request, reference), _chosen(reference.seen, request))
    labels = len(request.chosen)
    result = LlamaCpp(
        answer["version"], len(texts), len(texts) - len(other), len(other) - len(odd), len(chats),
        len(chats) - len(other_chats), len(request.lengths), labels, found,
    )  # fmt: skip
    noted = f" ({result.explained_splits} others: see the notes)" if result.explained_splits else ""
    say(
        f"llama.cpp ({result.version}): {result.same_splits} of {len(texts)} texts split as in training{noted}, "
        f"{result.same_chats} of {len(chats)} conversations written alike; on {labels} labels its divergence from the "
        f"tuned model is {found.divergence:.1e}, {100 * found.same_tokens:.1f} % of its choices are the same"
    )
    if not may_differ:
        _require_none(odd, len(texts), "splits texts")
        _require_none(other_chats, len(chats), "writes conversations")
    return result


def _require_none(other: list[str], of: int, what: str) -> None:
    if other:
        raise ModelError(
            f"llama.cpp {what} otherwise than the training, and no known difference explains it.",
            expected=f"{of} alike",
            got=f"{len(other)} that differ; the first begins with {other[0][:SHOWN]!r}",
            do="keep it as an MLX model (safetrain fuse), or take it as it is with --may-lose 100",
        )


def _rendered(tokenizer: ChatTokenizer, taught: Taught | None, chat: list[dict[str, str]]) -> str | None:
    if not tokenizer.template:
        return None
    try:
        prompt = tokenizer.template.write(chat, prompt=True)
    except TemplateError:  # a template without system messages
        return None
    return prompt.removesuffix(taught.asked) + taught.opening if taught else prompt


def _request(rows: TokenRows, seen: Seen) -> Request:
    """The first rows, cut to ``MOST_TOKENS``, whose logits are not too large to be kept.

    Where every prompt is longer than that: the row whose first label comes first, cut behind a few labels.
    """
    row_of, place = (seen.keys >> PLACE_BITS) - 1, seen.keys & (2**PLACE_BITS - 1)
    most_labels = max(1, MOST_LOGIT_BYTES // (FLOAT32 * 2**17))
    most_tokens = MOST_TOKENS
    chosen = np.flatnonzero(place < most_tokens)[:most_labels]
    if not len(chosen):
        most_tokens = int(place.min()) + LABELS_AT_ONCE
        chosen = np.flatnonzero((row_of == row_of[place.argmin()]) & (place < most_tokens))
    numbers, within = np.unique(row_of[chosen], return_inverse=True)
    ids = [np.asarray(rows[int(number)].ids[: most_tokens + 1]) for number in numbers]
    targets = np.array([ids[row][at + 1] for row, at in zip(within, place[chosen], strict=True)])
    cut = [each[:most_tokens] for each in ids]
    return Request(
        np.concatenate(cut), np.array([len(each) for each in cut]), chosen, within, place[chosen], targets
    )  # fmt: skip


def _ask(file: Path, request: Request, texts: list[str], chats: list[list[dict[str, str]]]) -> tuple[np.ndarray, dict]:
    """The logits (labels, vocabulary), and the version, tokens and chats; raises ModelError."""
    with tempfile.TemporaryDirectory() as folder:
        values = {name: getattr(request, name) for name in ("ids", "lengths", "rows", "places")}
        np.savez(Path(folder) / "request.npz", **values)
        (Path(folder) / "request.json").write_text(json.dumps({"texts": texts, "chats": chats}), encoding="utf-8")
        worker = "safetrain.engine.exchange.llama_worker"
        command = [sys.executable, "-m", worker, str(file), folder, str(os.getpid())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            step = (done.stdout.split() or ["open"])[-1]
            raise ModelError(
                FAILURES.get(step, FAILURES["open"]),
                where=str(file),
                got=" ".join(done.stderr.split()[-60:]) or f"exit code {done.returncode}",
                do="report this model's family and tokenizer; nothing was kept",
            )
        answer = json.loads((Path(folder) / "answer.json").read_text(encoding="utf-8"))
        return np.load(Path(folder) / "answer.npz")["logits"], answer


def _chosen(seen: Seen, request: Request) -> Seen:
    some = request.chosen
    return Seen(seen.keys[some], seen.losses[some], seen.greedy[some], seen.right[some], seen.divergences[some])


def _seen(logits: np.ndarray, request: Request, reference: Reference) -> Seen:
    """llama.cpp's logits (labels, vocabulary) as another model that is compared with the tuned one."""
    head, found = reference.head(), []
    for start in range(0, len(request.chosen), LABELS_AT_ONCE):
        some = slice(start, start + LABELS_AT_ONCE)
        ours = head(mx.array(reference.states[request.chosen[some]]))
        found.append(compared(ours, mx.array(logits[some]), request.targets[some]))
    losses, greedy, right, divergences = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Seen(reference.seen.keys[request.chosen], losses, greedy, right, divergences)
