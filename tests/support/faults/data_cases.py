"""The faults that lie in batches, masks and the reading of rows: 1, 2, 3, 9, 11, 14."""

import functools
import json
import shutil
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tuner.datasets import CacheDataset, ChatDataset, load_dataset

from safetrain.core.data.store import open_store, store_path
from safetrain.core.data.tokenizer import ChatTokenizer
from tests.support.faults import peer
from tests.support.faults.fault import Fault, Finding
from tests.support.faults.project import (
    POSITIONS,
    Done,
    Project,
    chat,
    is_finite,
    scratch,
    tiny_model,
    weights,
    write_rows,
)
from tests.support.random_models import EMBEDDED
from tests.support.settings import as_trained

BATCH = 4
MOST_PADDING = 0.25
MOST_SHAPES = 16
STATES = 3  # in which mlx-lm's step is compiled: with an update, without, and without and on top of earlier gradients
QUESTIONS = [("What is iron?", "Fe."), ("Capital of Oman?", "Muscat."), ("And of Peru?", "Lima."), ("Gold?", "Au.")]
CHATS = [chat(question, answer) for question, answer in QUESTIONS]


@functools.cache
def long_tail() -> list[dict[str, Any]]:
    """256 text rows, most of them short and a few long, in no order."""
    lengths = np.random.default_rng(5).lognormal(4.5, 0.7, 256).clip(16, 450).astype(int)
    return [{"text": "iron " * int(length)} for length in lengths]


def load(data: Path, mask_prompt: bool = False, model: Path | None = None) -> Any:
    """A data folder as mlx-lm reads it: train, valid, test."""
    args = types.SimpleNamespace(data=str(data), train=True, test=False, mask_prompt=mask_prompt)
    with peer.quiet():
        return load_dataset(args, peer.tokenizer(model))


def length_sort_peer() -> Finding:
    """What mlx-lm sorts by, and how much of its batches is padding."""
    data = load(write_rows(scratch() / "long-tail", long_tail(), CHATS))[0]
    cached = CacheDataset(data)
    keys = {cached.itemlen(index) for index in range(len(cached))}
    lengths = [len(cached[index][0]) for index in range(len(cached))]
    places = sum(batch.size for batch, _ in peer.batches(data, BATCH))
    share = 1 - sum(lengths) / places
    text = f"lengths {min(lengths)} to {max(lengths)} are sorted as {sorted(keys)}; {100 * share:.0f} % padding"
    return Finding(len(keys) == 1 and share > MOST_PADDING, text)


@functools.cache
def long_tail_run() -> tuple[Done, float]:
    """One pass of ours over the same rows, and the share of padding in it."""
    project = Project("long-tail", long_tail(), CHATS)
    pins = (f"train.batch_size={BATCH}", "train.gradient_accumulation=8", "train.num_epochs=1", "train.eval_steps=8")
    project.plan(*pins)
    done = project.train(*pins)
    share = project.summary().get("padding_share")
    if share is None:  # not reported: from the batches, which are complete as long as steps are not compiled
        rows = open_store(store_path(project.folder / "data/validated", "train")).rows
        share = 1 - int(rows.inputs().sum()) / sum(count * width for count, width, _ in done.calls)
    return done, share


def length_sort_ours() -> Finding:
    """How much of our batches is padding."""
    share = long_tail_run()[1]
    return Finding(not 0 <= share < MOST_PADDING, f"{100 * share:.0f} % padding on the same rows")


def pad_target_peer() -> Finding:
    """How many labels mlx-lm counts, and what the last one of a row is."""
    answer_tokens, data = expected_labels(), load(write_rows(scratch() / "pads", CHATS, CHATS), mask_prompt=True)[0]
    found = [peer.targets(*batch) for batch in peer.batches(data, 1)]
    count = sum(len(row) for row in found)
    ends = {tuple(row[-2:]) for row in found}
    text = f"{count} labels in {len(CHATS)} rows: the last ones of a row are {sorted(ends)}, its end and a padding 0"
    return Finding(count == answer_tokens + len(CHATS), text)


def expected_labels() -> int:
    """The answers' tokens, each closed by one end token; with the tokenizer alone."""
    tokenizer = peer.tokenizer()
    return sum(len(tokenizer.encode(answer)) + 1 for _, answer in QUESTIONS)


def pad_target_ours() -> Finding:
    """The labels that one epoch of ours counts."""
    project = Project("pads", CHATS)
    project.plan()
    project.train("train.num_epochs=1")
    count = project.summary()["trained_tokens"]
    return Finding(count != expected_labels(), f"{count} labels in {len(CHATS)} rows")


def too_long() -> list[dict[str, Any]]:
    """Rows of which one has a prompt that is longer than 64 tokens."""
    return [*CHATS, chat("What is iron? " * 20, "Fe.")]


def long_prompt_peer() -> Finding:
    """What one row with too long a prompt leaves of mlx-lm's adapter and of its validation."""
    folder = scratch() / "too-long"
    data = write_rows(folder / "rows", too_long(), too_long())
    arguments = ["--mask-prompt", "--max-seq-length", "64", "--batch-size", "1", "--iters", "5"]
    peer.command_line(data, folder, *arguments)
    adapter = weights(folder / "adapters.safetensors")
    spoiled = sum(not np.isfinite(value).all() for value in adapter.values())
    valid = load(data, mask_prompt=True)[1]
    losses = [float(np.array(loss)) for loss in losses_of(valid)]
    text = f"loss {losses[-1]} for that row; NaN in {spoiled} of {len(adapter)} matrices of the saved adapter"
    return Finding(spoiled > 0 and not np.isfinite(losses[-1]), text)


def losses_of(data: Any) -> list[mx.array]:
    """mlx-lm's loss of each row at a length of 64, in order."""
    model = peer.adapted_model()
    rows = [peer.batches(peer.TokenRows([data.process(data[index])]), 1, 64)[0] for index in range(len(data))]
    with peer.quiet():
        return [peer.default_loss(model, *batch)[0] for batch in rows]


def long_prompt_ours() -> Finding:
    """The same rows and the same length in ours."""
    project = Project("too-long", too_long(), too_long())
    project.plan("train.max_seq_length=64")
    done = project.train("train.max_seq_length=64", "train.num_epochs=1", "train.batch_size=1")
    losses = [*project.column("train_loss"), *project.column("valid_loss")]
    finite = bool(np.isfinite(losses).all()) and is_finite(project.adapter())
    told = next((line for line in done.out.splitlines() if "cut to" in line), "")
    return Finding(not (finite and told), f"every loss and weight is a number; it says: {told!r}")


BAD_FOURTH = [*CHATS[:3], {"txt": "wrong key"}, *CHATS[3:]]


def late_checks_peer() -> Finding:
    """When mlx-lm meets a bad row, a blank line, too small a validation file; and which rows it never sees."""
    folder = scratch() / "late"
    bad = load(write_rows(folder / "bad", BAD_FOURTH, CHATS))[0]  # loads without a word
    met = raised(lambda: peer.trained(peer.adapted_model(), bad, folder, batch_size=1, iters=8))
    blank = raised(lambda: load(write_rows(folder / "blank", [*CHATS, "", *CHATS], CHATS)))
    good = load(write_rows(folder / "small", CHATS * 3, CHATS[:1]))
    small = raised(
        lambda: peer.trained(peer.adapted_model(), good[0], folder, valid=good[1], batch_size=BATCH, iters=4)
    )
    ten = peer.TokenRows([([100 + index, 5, 6], 0) for index in range(10)])
    seen = {int(first) for batch, _ in peer.batches(ten, BATCH) for first in np.array(batch)[:, 0]}
    text = (
        f"row 4: {type(met).__name__} while training; blank line: {type(blank).__name__} that names no file; "
        f"1 row of validation: {type(small).__name__} at iteration 1; {len(seen)} of 10 rows are seen"
    )
    wrong = isinstance(met, KeyError) and isinstance(small, ValueError) and len(seen) == 8
    return Finding(wrong and blank is not None and "jsonl" not in str(blank), text)


def raised(action: Any) -> Exception | None:
    """The exception that ``action`` ends with."""
    try:
        action()
    except (KeyError, ValueError, RuntimeError) as error:
        return error
    return None


def late_checks_ours() -> Finding:
    """The same files in the first stage of ours, and the rows that an epoch counts."""
    bad = Project("bad", BAD_FOURTH, CHATS)
    told = bad.stage("validate_data")
    named = f"{bad.data}/train.jsonl:4:" in told.err
    blank = Project("blank", [*CHATS, "", *CHATS[:1], *CHATS, *CHATS[:1]], CHATS[:1])  # 10 rows, 1 of validation
    pins = (f"train.batch_size={BATCH}", "train.gradient_accumulation=1", "train.num_epochs=1")
    blank.plan(*pins)
    blank.train(*pins)
    labels = 2 * expected_labels() + 2 * (len(peer.tokenizer().encode(QUESTIONS[0][1])) + 1)
    all_seen = blank.summary()["trained_tokens"] == labels
    text = (
        f"row 4: exit {told.code} of the first stage, {'train.jsonl:4' if named else 'not'} named; blank line and "
        f"1 row of validation: trains; {'10' if all_seen else 'not all'} of 10 rows are seen"
    )
    return Finding(not (told.code == 3 and named and all_seen), text)


def thinking_tokenizer() -> Path:
    """The tiny model with a template that opens an answer with more than it keeps, as Qwen3's does."""
    folder = scratch() / "thinking"
    if not folder.exists():
        shutil.copytree(tiny_model(), folder)
        config = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
        turns = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
        opening = "{% if add_generation_prompt %}{{ '<|assistant|>No thoughts here. ' }}{% endif %}"
        (folder / "tokenizer_config.json").write_text(
            json.dumps({**config, "model_max_length": POSITIONS, "chat_template": turns + opening})
        )
    return folder


TURNS = [("user", "Symbol of iron?"), ("assistant", "It is Fe."), ("user", "Of gold?"), ("assistant", "It is Au.")]
TWO_TURNS = {"messages": [{"role": role, "content": text} for role, text in TURNS]}
WANTED = "It is Fe.<|end|>It is Au.<|end|>"


def mask_peer() -> Finding:
    """The text that mlx-lm trains of a chat of two turns: by Qwen3's way of opening an answer, and the plain way."""
    tokenizer = peer.tokenizer(thinking_tokenizer())
    data = ChatDataset([TWO_TURNS], tokenizer, mask_prompt=True)
    ids, offset = data.process(TWO_TURNS)
    labels = peer.targets(*peer.batches(peer.TokenRows([(ids, offset)]), 1)[0])
    found = tokenizer.decode(labels)
    plain = ChatDataset([TWO_TURNS], peer.tokenizer(), mask_prompt=True).process(TWO_TURNS)
    last = tokenizer.decode(peer.targets(*peer.batches(peer.TokenRows([plain]), 1)[0]))
    text = f"trains {found!r} (the prompt is taken to be {offset} tokens of {len(ids)}); by a plain template {last!r}"
    return Finding(found != WANTED and last != WANTED, text)


def mask_ours() -> Finding:
    """The text that ours trains of it."""
    rendered = as_trained(ChatTokenizer(thinking_tokenizer()), TWO_TURNS)
    labels = rendered.ids[rendered.trained].tolist()
    found = peer.tokenizer().decode(labels)
    plain = as_trained(ChatTokenizer(tiny_model()), TWO_TURNS)
    last = peer.tokenizer().decode(plain.ids[plain.trained].tolist())
    return Finding(not found == last == WANTED, f"trains {found!r} by both templates")


def shapes_peer() -> Finding:
    """The shapes that mlx-lm's compiled step meets, each in up to three accumulation states."""
    data = load(write_rows(scratch() / "shapes", long_tail(), CHATS))[0]
    shapes = {tuple(batch.shape) for batch, _ in peer.batches(data, BATCH)}
    return Finding(len(shapes) > MOST_SHAPES, f"{len(shapes)} shapes, accumulating up to {STATES * len(shapes)} graphs")


def shapes_ours() -> Finding:
    """The graphs that a run of ours compiles for the same rows."""
    calls = long_tail_run()[0].calls
    graphs = sum(traced for _, _, traced in calls)
    shapes = len({(rows, tokens) for rows, tokens, _ in calls})
    text = f"{shapes} shapes, {graphs} graphs{'' if graphs else ': the step is not compiled here'}"
    return Finding(not calls or graphs > MOST_SHAPES, text)


FAULTS = [
    Fault(
        1,
        "The sort by length does nothing",
        f"rows of like length together: less than {100 * MOST_PADDING:.0f} % padding",
        length_sort_peer,
        length_sort_ours,
    ),
    Fault(
        2,
        "One padding token per row is trained",
        "as many labels as the answers have tokens, their ends included",
        pad_target_peer,
        pad_target_ours,
    ),
    Fault(
        3,
        "A prompt longer than the limit gives NaN for ever",
        "finite losses and weights",
        long_prompt_peer,
        long_prompt_ours,
    ),
    Fault(
        9,
        "Data is checked when the loop reaches it",
        "bad rows named by file and line before training, every row seen",
        late_checks_peer,
        late_checks_ours,
    ),
    Fault(11, "The mask goes by length, not by content", f"trains {WANTED!r}", mask_peer, mask_ours),
    Fault(14, "Every new shape compiles anew", f"at most {MOST_SHAPES} graphs", shapes_peer, shapes_ours),
]
