"""Says in a few lines what a finished run learnt and what to try next. Reads files, touches nothing."""

import json
from pathlib import Path
from typing import Any

from safetrain.core.again import DVC
from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted, duration_text
from safetrain.core.records.adapter_files import fingerprint
from safetrain.core.records.evaluation import (
    Forgetting,
    Improvement,
    Score,
    Thresholds,
    Verdict,
    describe_forgetting,
    describe_improvement,
    describe_sample,
    judge,
)
from safetrain.core.records.record_files import from_json
from safetrain.core.records.schema import PRETRAIN
from safetrain.core.storage.run_files import SAMPLES

EXAMPLE = "data/example"  # what the project ships with


def describe_result(evaluation: Path, summary: Path, adapter: Path, command: str = DVC, data: str = EXAMPLE) -> str:
    """A short text for the terminal; raises ConfigError when there is no finished run that was evaluated.

    ``command`` is what ran the pipeline, ``data`` its data.path.
    """
    scores, run = _scores(evaluation, adapter), _read(summary)
    base, tuned, gain = scores["base"], scores["tuned"], from_json(Improvement, scores["improvement"])
    pretrained = run.get("method") == PRETRAIN
    done = f"{counted(run['steps'], 'update')} on {counted(run['train_rows'], 'window' if pretrained else 'row')}"
    lines = ["", f"Trained {done} in {duration_text(run['elapsed_seconds'])}."]
    if tuned["exact_match"] is not None:
        lines.append(
            f"Of {counted(scores['answered'], 'test question')}, "
            f"base answers {100 * base['exact_match']:.1f} % exactly, tuned {100 * tuned['exact_match']:.1f} %."
        )
    lines.append(f"Loss on the test file: {base['loss']:.3f} before, {tuned['loss']:.3f} after.")
    if bits := run.get("best_valid_bits_per_byte"):
        lines.append(f"Its loss on the validation documents is {bits:.3f} bits per byte of text.")
    lines.append(f"The {'trained' if pretrained else 'tuned'} model is {describe_improvement(gain)}.")
    forgetting = from_json(Forgetting, scores["forgetting"])
    if not pretrained or forgetting.nats_per_token is not None:  # an untrained model has nothing to forget
        said = describe_forgetting(forgetting)
        lines.append(f"{said[0].upper()}{said[1:]}.")
    if pretrained:
        return "\n".join([*lines, *_written(summary.parent / SAMPLES), "", *_next_of_pretrained(command)])
    sample = scores["samples"][0] if scores["samples"] else None
    if sample:
        lines += ["", describe_sample(sample["question"], sample["base"], sample["tuned"])]
    question = sample["question"] if sample and _can_be_typed(sample["question"]) else "..."
    return "\n".join([*lines, "", *_next(question, command, data)])


def _written(samples: Path) -> list[str]:
    """What the model wrote at its last validation; nothing where it is not known."""
    try:
        found = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    last = [each for each in found if each["step"] == found[-1]["step"]]
    return ["", *(f"  {each['prompt']}[{each['text'].strip()}]".replace("\n", " ") for each in last)]


def _next_of_pretrained(command: str) -> list[str]:
    """What to type after a model was trained from scratch."""
    kept = " ".join(word for word in command.split(" ") if not word.startswith("train.max_steps="))
    again = "dvc exp run -S" if command.startswith("dvc ") else kept
    return [
        "Next:  source .venv/bin/activate",
        '       safetrain ask "The "                     # it goes on with a text; it has not learnt to answer',
        "       open checkpoints_qlora/report.html",
        "       safetrain fuse models/mine               # a model of its own; then model.path=models/mine",
        f"       {f'{again} train.max_steps=…':<40} # a longer run; its results replace these",
    ]


def _next(question: str, command: str, data: str) -> list[str]:
    """What to type next, after a run by DVC or without it."""
    by_dvc = command.startswith("dvc ")
    lines = [
        "Next:  source .venv/bin/activate",
        f'       safetrain ask "{question}" --base',
        "       safetrain chat --compare                 # base and tuned in a chat; a server: safetrain serve",
        "       dvc metrics show                         # then open checkpoints_qlora/report.html"
        if by_dvc
        else "       open checkpoints_qlora/report.html",
        "       safetrain fuse fused                     # base and adapter as one model, and what it keeps",
    ]
    if by_dvc:
        lines += [
            "       git add -A && git commit -m first        # keep this; come back: git checkout . && dvc checkout",
            "       dvc exp run -S train.learning_rate=2e-3  # another run; compare: dvc exp show",
        ]
    else:
        lines += [
            f"       {f'{command} train.learning_rate=2e-3':<40} # another run; its results replace these",
            f"       {DVC:<40} # the same with DVC, which keeps every run, to compare and to come back to",
        ]
    if data.split("/")[:2] != EXAMPLE.split("/"):
        return lines
    return [
        *lines,
        f"       your own data: put a .jsonl into data/, its path into params.yaml (data.path), then: {command}",
    ]


def gate(evaluation: Path, adapter: Path, asked: Thresholds) -> Verdict:
    """Whether the last run is better than its base; raises ConfigError when there is none that was evaluated."""
    scores = _scores(evaluation, adapter)
    improvement, tuned = from_json(Improvement, scores["improvement"]), from_json(Score, scores["tuned"])
    return judge(improvement, tuned, from_json(Forgetting, scores["forgetting"]), asked)


def unmeasured(evaluation: Path, adapter: Path, state: Path) -> str:
    """In a line, why nobody knows how good this adapter is; empty where evaluation.json is about it.

    ``state``: training_state.json, of an unfinished training or of the last one.
    """
    try:
        unfinished = not _read(state).get("finished", False)
    except ConfigError:
        unfinished = False
    try:
        _scores(evaluation, adapter)
    except ConfigError:
        why = "its training is not finished" if unfinished else "'python -m stages.evaluate' measures it"
        return f"this adapter has not been evaluated: {why}"
    return "a training is not finished: this is the adapter of the one before" if unfinished else ""


def _scores(evaluation: Path, adapter: Path) -> dict[str, Any]:
    """evaluation.json, if it is about the adapter that is there."""
    scores = _read(evaluation)
    if scores.get("adapter") != fingerprint(adapter) or not scores.keys() >= {"improvement", "forgetting"}:
        raise ConfigError(
            "The last training has not been evaluated.",
            where=str(evaluation),
            do="'python -m stages.evaluate' measures it, 'dvc repro' puts the recorded result back",
        )
    return scores


def _can_be_typed(question: str) -> bool:
    """Short, and without what a shell reads inside double quotes."""
    return len(question) <= 80 and not set(question) & set('"$`\\!\n')


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(
            "There is no finished run yet.",
            where=str(path),
            do="run 'dvc repro', or the command that began the run: it continues",
        ) from None
