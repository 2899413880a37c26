"""postmortem.json: why a training ended, written by the guard and read by all the rest."""

from dataclasses import dataclass
from pathlib import Path

from safetrain.core.formatting import counted, size_text
from safetrain.core.memory.system import OWN_LIMIT
from safetrain.core.storage.files import read_or_none
from safetrain.core.storage.paths import POSTMORTEM


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
    quoted: tuple[str, ...] = ()  # evidence in the words of another program
    went_on: bool = False  # whether the run continued by itself
    rank: int | None = None  # rank that ended the training; None: one process, or all ranks
    ranks: int = 1
    host: str = ""  # machine of that rank; empty: this one


def read_postmortem(output: Path) -> PostMortem | None:
    """Read postmortem.json; None if no training has ended badly here."""
    return read_or_none(output / POSTMORTEM, PostMortem)


def describe(death: PostMortem, *, with_next: bool = True) -> str:
    """Describe the end of a training in lines of text, for people."""
    rows = [*describe_rows(death), *([("next", death.next_command)] if with_next else [])]
    return "\n".join(f"  {label + ':':<10}{text}" for label, text in rows)


def describe_rows(death: PostMortem) -> list[tuple[str, str]]:
    """List the labels and texts of that description, without the next command."""
    rows = [("what", f"{death.title} ({death.confidence})"), ("where", describe_place(death))]
    rows += [("memory", describe_memory(death))] if death.footprint_bytes else []
    rows += [("because", text) for text in death.evidence]
    saved = f"everything up to step {death.resumes_from_step}" if death.resumes_from_step else "no checkpoint yet"
    rows.append(("kept", saved))
    return [*rows, ("advice", death.advice)] if death.advice else rows


def describe_place(death: PostMortem) -> str:
    """``gradient of step 3, micro-batch 0: 4 rows, 512 tokens (train.jsonl lines 7, 9, …)``."""
    text = f"{death.phase} of step {death.step}".replace("save of", "saving") if death.step else death.phase
    text = "while checking the saved adapter" if "verify" in death.phase else text
    if death.rows:
        size = f"{counted(death.rows, 'row')}, {counted(death.tokens, 'token')}"
        text += f", micro-batch {death.micro_batch}: {size}"
    if death.row_ids:
        ids = ", ".join(map(str, death.row_ids)) + (", …" if death.rows > len(death.row_ids) else "")
        text += f" (train.jsonl {'line' if death.rows == 1 else 'lines'} {ids})"
    return text if death.rank is None else f"{describe_rank(death)}; {text}"


def describe_memory(death: PostMortem) -> str:
    """Compare the memory of the process with its limit, and mlx's memory with the prediction."""
    process = "process" if death.ranks == 1 else f"all {death.ranks} ranks"
    kind = "private memory" if death.limit_name == OWN_LIMIT else process
    text = f"{kind} {size_text(death.footprint_bytes)} of {size_text(death.limit_bytes)} ({death.limit_name})"
    if death.predicted_peak_bytes:
        predicted = size_text(death.predicted_peak_bytes)
        text += f"; mlx {size_text(death.mlx_active_bytes)}, predicted peak {predicted}"
    return text


def describe_rank(death: PostMortem) -> str:
    """Name the rank that ended the training, and its machine."""
    return f"rank {death.rank} of {death.ranks}, on {death.host or 'this machine'}"
