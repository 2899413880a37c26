"""postmortem.json: how a training ended, as the guard writes it and everybody who shows it reads it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Replay:
    """What repeating the fatal batch, phase by phase, has shown."""

    died_in: str  # empty: the batch alone passes
    cause: str
    largest_rows: int  # that pass at ``largest_tokens``; 0: nothing does
    largest_tokens: int
    attempts: tuple[str, ...]


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
    step: int  # the update that was being made, from 1; 0 before the first
    micro_batch: int
    rows: int
    tokens: int
    row_ids: tuple[int, ...]  # line numbers in data/validated/train.jsonl, the first few
    footprint_bytes: int  # as the limit counts: private memory under train.memory_limit_gb
    limit_bytes: int
    limit_name: str
    predicted_peak_bytes: int
    mlx_active_bytes: int
    mlx_peak_bytes: int
    loss: float | None  # of the last update; None: not a number
    resumes_from_step: int
    next_command: str
    exit_code: int
    ended_seconds: float  # wall clock
    replay: Replay | None = None
    quoted: tuple[str, ...] = ()  # lines of the evidence that are not our own words
    went_on: bool = False  # by itself, with other settings
    rank: int | None = None  # that ended the training; None: there is one, or all ended for the same reason
    ranks: int = 1  # of the training
    host: str = ""  # of that rank; empty: this machine
