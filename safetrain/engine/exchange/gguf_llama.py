"""What llama.cpp itself makes of a GGUF file, beside the training's tokenizer, template and tuned model."""

import importlib.util
import json
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
) -> LlamaCpp | None:
    """Split texts, render conversations and compute some of the rows; None where llama.cpp is not installed.

    Raises ModelError where it cannot open the file.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        say(ABSENT)
        return None
    request = _request(rows, reference.seen)
    texts = [tokenizer.spell(rows[number].ids.tolist()) for number in range(min(len(rows), MOST_TEXTS))]
    chats = [(chat, prompt) for chat in CHATS if (prompt := _rendered(tokenizer, taught, chat)) is not None]
    logits, answer = _ask(file, request, texts, [chat for chat, _ in chats])
    splits = [tokenizer.encode_chat(text) for text in texts]
    same_splits = sum(ours == theirs for ours, theirs in zip(splits, answer["tokens"], strict=True))
    same_chats = sum(prompt == found for (_, prompt), found in zip(chats, answer["chats"], strict=True))
    found = likeness(_seen(logits, request, reference), _chosen(reference.seen, request))
    labels = len(request.chosen)
    result = LlamaCpp(
        answer["version"], len(texts), same_splits, len(chats), same_chats, len(request.lengths), labels, found
    )
    say(
        f"llama.cpp ({result.version}): {same_splits} of {len(texts)} texts split as in training, {same_chats} of "
        f"{len(chats)} conversations written alike; on {labels} labels its divergence from the tuned model is "
        f"{found.divergence:.1e}, {100 * found.same_tokens:.1f} % of its choices are the same"
    )
    return result


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
    with tempfile.TemporaryDirectory() as folder:
        values = {name: getattr(request, name) for name in ("ids", "lengths", "rows", "places")}
        np.savez(Path(folder) / "request.npz", **values)
        (Path(folder) / "request.json").write_text(json.dumps({"texts": texts, "chats": chats}), encoding="utf-8")
        command = [sys.executable, "-m", "safetrain.engine.exchange.llama_worker", str(file), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ModelError(
                "llama.cpp cannot open the file that was written.",
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
