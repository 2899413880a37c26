"""postmortem.json: why a training ended, as the guard writes it and everyone else reads it."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.formatting import counted, size_text
from safetrain.core.memory.budget import OWN_LIMIT
from safetrain.core.storage.files import from_json
from safetrain.core.storage.run_files import POSTMORTEM


@dataclass(frozen=True)
class PostMortem:
    """postmortem.json."""

    cause: str
    title: str
    confidence: str
    is_memory: bool
    evidence: tuple[str, ...]
    advice: str
    phase: str
    step: int  # step in progress, from 1; 0 before the first
    micro_batch: int
    rows: int
    tokens: int
    row_ids: tuple[int, ...]  # first lines of data/validated/train.jsonl in the micro-batch
    footprint_bytes: int  # memory of the process, counted as its limit counts
    limit_bytes: int
    limit_name: str
    predicted_peak_bytes: int
    mlx_active_bytes: int
    mlx_peak_bytes: int
    loss: float | None  # loss of the last step; None: not a number
    resumes_from_step: int
    next_command: str
    exit_code: int
    ended_seconds: float  # time of the end, Unix seconds
    quoted: tuple[str, ...] = ()  # evidence in the words of another program
    went_on: bool = False  # whether the run continued by itself
    rank: int | None = None  # rank that ended the training; None: one process, or all ranks
    ranks: int = 1
    host: str = ""  # machine of that rank; empty: this one


def read_postmortem(output: Path) -> PostMortem | None:
    """The last one; None if no training has ended badly here."""
    try:
        return from_json(PostMortem, json.loads((output / POSTMORTEM).read_text(encoding="utf-8")), partly=True)
    except (OSError, ValueError, TypeError):
        return None


def describe(found: PostMortem, *, with_next: bool = True) -> str:
    """The paragraph that people read."""
    rows = [*describe_rows(found), *([("next", found.next_command)] if with_next else [])]
    return "\n".join(f"  {label + ':':<10}{text}" for label, text in rows)


def describe_rows(found: PostMortem) -> list[tuple[str, str]]:
    """The lines of that paragraph without the next command: label and text."""
    rows = [("what", f"{found.title} ({found.confidence})"), ("where", describe_place(found))]
    rows += [("memory", describe_memory(found))] if found.footprint_bytes else []
    rows += [("because", text) for text in found.evidence]
    saved = f"everything up to step {found.resumes_from_step}" if found.resumes_from_step else "no checkpoint yet"
    rows.append(("kept", saved))
    return [*rows, ("advice", found.advice)] if found.advice else rows


def describe_place(found: PostMortem) -> str:
    """``gradient of step 3, micro-batch 0: 4 rows, 512 tokens (train.jsonl lines 7, 9, …)``."""
    text = found.phase + (f" of step {found.step}" if found.step else "")
    if found.rows:
        size = f"{counted(found.rows, 'row')}, {counted(found.tokens, 'token')}"
        text += f", micro-batch {found.micro_batch}: {size}"
    if found.row_ids:
        ids = ", ".join(map(str, found.row_ids)) + (", …" if found.rows > len(found.row_ids) else "")
        text += f" (train.jsonl {'line' if found.rows == 1 else 'lines'} {ids})"
    return text if found.rank is None else f"{describe_rank(found)}; {text}"


def describe_memory(found: PostMortem) -> str:
    """Memory of the process next to its limit, and mlx's next to the prediction."""
    process = "process" if found.ranks == 1 else f"all {found.ranks} ranks"
    kind = "private memory" if found.limit_name == OWN_LIMIT else process
    text = f"{kind} {size_text(found.footprint_bytes)} of {size_text(found.limit_bytes)} ({found.limit_name})"
    if found.predicted_peak_bytes:
        predicted = size_text(found.predicted_peak_bytes)
        text += f"; mlx {size_text(found.mlx_active_bytes)}, predicted peak {predicted}"
    return text


def describe_rank(found: PostMortem) -> str:
    """The rank that ended the training, and its machine."""
    return f"rank {found.rank} of {found.ranks}, on {found.host or 'this machine'}"
