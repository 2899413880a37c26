"""postmortem.json: why a training run ended, and what people read of it."""

from dataclasses import dataclass

from safetrain.core.formatting import counted, size_text


@dataclass(frozen=True)
class PostMortem:
    """postmortem.json: why a training run ended, and what it was doing."""

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
    row_ids: tuple[int, ...]  # numbers of the first rows in the micro-batch: lines of train.jsonl
    footprint_bytes: int  # memory of the process, as its limit counts it
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
    went_on: bool = False  # whether the run continued by itself
    rank: int | None = None  # rank that ended the training; None: one process, or all ranks
    ranks: int = 1
    host: str = ""  # machine of that rank; empty: this one


def describe(death: PostMortem) -> str:
    """Describe the end of a training run in lines of text, for people."""
    rows = [*describe_rows(death), ("next", death.next_command)]
    return "\n".join(f"  {label + ':':<10}{text}" for label, text in rows)


def describe_rows(death: PostMortem) -> list[tuple[str, str]]:
    """List the lines of ``describe`` as labels and texts, without the next command.

    The text of ``where`` is like ``gradient of step 3, micro-batch 0: 4 rows, 512 tokens (train.jsonl lines 7, 9, …)``.
    """
    place = f"{death.phase} of step {death.step}" if death.step else death.phase
    if death.rows:
        place += f", micro-batch {death.micro_batch}: {counted(death.rows, 'row')}, {counted(death.tokens, 'token')}"
    if death.row_ids:
        more = ", …" if death.rows > len(death.row_ids) else ""
        place += f" (train.jsonl lines {', '.join(map(str, death.row_ids))}{more})"
    if death.rank is not None:
        place = f"{describe_rank(death)}; {place}"
    rows = [("what", f"{death.title} ({death.confidence})"), ("where", place)]
    if death.footprint_bytes:
        process = "process" if death.ranks == 1 else f"all {death.ranks} ranks"
        text = f"{process} {size_text(death.footprint_bytes)} of {size_text(death.limit_bytes)} ({death.limit_name})"
        mlx = f"; mlx {size_text(death.mlx_active_bytes)}, predicted peak {size_text(death.predicted_peak_bytes)}"
        rows.append(("memory", text + (mlx if death.predicted_peak_bytes else "")))
    rows += [("because", text) for text in death.evidence]
    saved = f"everything up to step {death.resumes_from_step}" if death.resumes_from_step else "no checkpoint yet"
    rows.append(("kept", saved))
    return [*rows, ("advice", death.advice)] if death.advice else rows


def describe_rank(death: PostMortem) -> str:
    """Name the rank that ended the training, and its machine."""
    return f"rank {death.rank} of {death.ranks}, on {death.host or 'this machine'}"
