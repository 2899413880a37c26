"""What a monitor shows, in words: rows of a name, a sign and parts, the most important first."""

from dataclasses import dataclass

from safetrain.core.formatting import counted, duration_text, printable, size_text
from safetrain.core.records.postmortem import PostMortem, Replay
from safetrain.watch.monitor_state import PhaseAge, State
from safetrain.watch.monitor_view import Level, MonitorView, memory_level
from safetrain.watch.time_left import time_left_text

SIGNS = {Level.FINE: "ok", Level.LOOK: "look", Level.WRONG: "!!"}
NO_SIGN = ""


@dataclass(frozen=True)
class ScreenRow:
    """A line, or several where it is narrow. ``sign``: ok, look, !!, or empty where there is nothing to judge."""

    name: str
    parts: tuple[str, ...]
    level: Level | None = None
    narrow_lines: int = 1  # that it may take in a narrow terminal

    @property
    def sign(self) -> str:
        """In letters: no colour is needed to read it."""
        return SIGNS[self.level] if self.level is not None else NO_SIGN


def rows_of(view: MonitorView) -> list[ScreenRow]:
    """All that is known; rows of which nothing is known are left out."""
    found = [_loss(view), _mlx(view), _saved(view), _damaged(view)]
    if view.verdict is None:  # which says the rest
        found = [_doing(view), _loss(view), _rate(view), _speed(view), _mlx(view), _process(view)]
        found += [_saved(view), _rung(view), _damaged(view)]
    return [row for row in found if row is not None and row.parts]


def headline(view: MonitorView) -> str:
    """The state, and of what."""
    return "  ".join(part for part in (view.state.value.upper(), printable(view.model), view.device) if part)


def progress_text(view: MonitorView) -> str:
    """How far it is."""
    made = view.progress
    if made.total_steps:
        text = f"step {made.step} of {made.total_steps}, {100 * made.step / made.total_steps:.0f} %"
    elif made.step:
        text = f"step {made.step}"
    else:
        return ""
    return text + (f", epoch {made.epoch:.2f}" if made.epoch is not None else "")


def left_text(view: MonitorView, *, short: bool = False) -> str:
    """How long it still takes; empty where that is not known."""
    left = view.progress.left
    return time_left_text(left, view.wall_seconds, short=short) if left is not None else ""


def age_text(seconds: float) -> str:
    """``0.3 s`` where ``duration_text`` would round it up to a second."""
    return f"{seconds:.1f} s" if seconds < 9.95 else duration_text(seconds)


def damaged_text(view: MonitorView) -> str:
    """How many lines could not be read."""
    return f"{counted(view.curves.damaged_lines, 'damaged line')} left out"


def verdict_rows(view: MonitorView) -> list[ScreenRow]:
    """How it ended, and what to do."""
    following = [ScreenRow("next", (view.next_command,), narrow_lines=3)] if view.next_command else []
    found = view.verdict
    if found is None:
        early = f"at step {view.progress.step}: validation no longer improved"
        return [ScreenRow("early", (early,), narrow_lines=2), *following] if view.stopped_early else following
    stopped = view.state is State.STOPPED
    rows = [ScreenRow("what", (f"{found.title} ({found.confidence})",), None if stopped else Level.WRONG, 3)]
    rows += [] if stopped else _where(found)
    rows += [ScreenRow("because", (text,), narrow_lines=2) for text in found.evidence]
    rows += [_replayed(found.replay)] if found.replay is not None else []
    kept = f"everything up to step {found.resumes_from_step}" if found.resumes_from_step else "no checkpoint yet"
    rows.append(ScreenRow("kept", (kept,)))
    rows += [ScreenRow("advice", (found.advice,), narrow_lines=3)] if found.advice else []
    return [*rows, *following]


def _where(found: PostMortem) -> list[ScreenRow]:
    place = found.phase + (f" of step {found.step}" if found.step else "")
    if found.rows:
        place += f", micro-batch {found.micro_batch}: {counted(found.rows, 'row')}, {counted(found.tokens, 'token')}"
    rows = [ScreenRow("where", (place,), narrow_lines=2)]
    if found.footprint_bytes:
        used = f"process {size_text(found.footprint_bytes)} of {size_text(found.limit_bytes)}"
        rows.append(ScreenRow("memory", (used, f"({found.limit_name})")))
    return rows


def _replayed(replay: Replay) -> ScreenRow:
    fits = f"{counted(replay.largest_rows, 'row')} of at most {counted(replay.largest_tokens, 'token')}"
    told = f"dies in {replay.died_in}; the largest that passes: {fits}"
    return ScreenRow("replay", (told if replay.died_in else "the same batch passes by itself",), narrow_lines=2)


def _doing(view: MonitorView) -> ScreenRow | None:
    phase = view.phase
    if phase is None or view.verdict is not None or view.state is State.FINISHED:
        return None
    level = Level.WRONG if phase.is_silent else Level.LOOK if phase.is_slow else Level.FINE
    parts = [f"{_place(phase)}: {age_text(phase.age_seconds)}"]
    if phase.longest_seconds is not None and view.state.is_running:
        parts.append(f"{age_text(phase.longest_seconds)} at the most before")
    if phase.is_slow and not phase.is_silent:
        parts.append("longer than it ever did")
    if phase.is_silent:
        parts.append("it hangs, and is being ended")
    if phase.rows:
        parts.append(f"{counted(phase.rows, 'row')}, {counted(phase.tokens, 'token')}")
    return ScreenRow(
        "doing" if view.state.is_running else "last", tuple(parts), level if view.state.is_running else None, 2
    )


def _place(phase: PhaseAge) -> str:
    text = phase.label + (f" of step {phase.step}" if phase.step else "")
    return text + (f", micro-batch {phase.micro_batch}" if phase.micro_batch else "")


def _loss(view: MonitorView) -> ScreenRow:
    losses, parts = view.losses, list[str]()
    if losses.train is not None:
        parts.append(f"train {losses.train:.4f}")
    if losses.valid is not None:
        parts.append(f"valid {losses.valid:.4f} at {losses.valid_step}")
    if losses.best is not None:
        parts.append(f"best {losses.best:.4f} at {losses.best_step}")
    if losses.base is not None:
        parts.append(f"before training {losses.base:.4f}")
    return ScreenRow("loss", tuple(parts), narrow_lines=2)


def _rate(view: MonitorView) -> ScreenRow:
    made, parts = view.progress, list[str]()
    if made.learning_rate is not None:
        parts.append(f"learning rate {made.learning_rate:.2e}")
    if made.grad_norm is not None:
        parts.append(f"gradient norm {made.grad_norm:.2f}")
    return ScreenRow("rate", tuple(parts))


def _speed(view: MonitorView) -> ScreenRow:
    made, parts = view.progress, list[str]()
    if made.step_seconds is not None:
        parts.append(f"{made.step_seconds:.3g} s an update")
    if made.labels_per_second is not None:
        parts.append(f"{made.labels_per_second:,.0f} labels/s")
    return ScreenRow("speed", tuple(parts))


def _mlx(view: MonitorView) -> ScreenRow | None:
    memory = view.memory
    if not memory.mlx_peak_bytes and not memory.mlx_active_bytes:
        return None
    parts = [f"active {size_text(memory.mlx_active_bytes)}", f"peak {size_text(memory.mlx_peak_bytes)}"]
    if memory.predicted_peak_bytes:
        parts.append(f"predicted {size_text(memory.predicted_peak_bytes)}")
    if memory.mlx_budget_bytes:
        parts.append(f"budget {size_text(memory.mlx_budget_bytes)}")
    over = memory.mlx_peak_bytes > 1.05 * memory.predicted_peak_bytes > 0
    level = max(Level.LOOK if over else Level.FINE, memory_level(memory.mlx_peak_bytes, memory.mlx_budget_bytes))
    return ScreenRow("mlx", tuple(parts), level, 2)


def _process(view: MonitorView) -> ScreenRow | None:
    memory = view.memory
    if not memory.process_bytes:
        return None
    parts = [f"{size_text(memory.process_bytes)} of {size_text(memory.process_limit_bytes)}"]
    parts.append(f"({memory.process_limit_name})")
    if view.state.is_running:
        parts.append(f"{size_text(memory.available_bytes)} free on the machine")
    return ScreenRow("process", tuple(parts), memory_level(memory.process_bytes, memory.process_limit_bytes))


def _saved(view: MonitorView) -> ScreenRow:
    saved, parts = view.checkpoints, list[str]()
    if saved.last_step is not None and saved.last_age_seconds is not None:
        parts.append(f"step {saved.last_step}, {duration_text(saved.last_age_seconds)} ago")
    elif view.state.is_running:
        parts.append("no checkpoint yet")
    if view.losses.best_step is not None:
        parts.append(f"best: step {view.losses.best_step}")
    return ScreenRow("saved", tuple(parts))


def _rung(view: MonitorView) -> ScreenRow | None:
    if not view.rung_parts:
        return None
    if not view.rung:
        return ScreenRow("rung", (*view.rung_parts, "as planned"))
    return ScreenRow("rung", (f"rung {view.rung}", *view.rung_parts), Level.LOOK)


def _damaged(view: MonitorView) -> ScreenRow | None:
    lines = view.curves.damaged_lines
    return ScreenRow("metrics", (damaged_text(view),), Level.LOOK) if lines else None
