"""How a run ended, and how it came to its end: verdict, continuations, rungs. Pure."""

import re
from datetime import UTC, datetime

from safetrain.core.formatting import counted, size_text
from safetrain.core.memory.budget import OWN_LIMIT
from safetrain.core.protocol.journal import BEGUN, DIED
from safetrain.core.records.job import memory_shape
from safetrain.core.records.postmortem import PostMortem
from safetrain.watch.report_page.answers_shown import cut
from safetrain.watch.report_page.charts import MarkedValue
from safetrain.watch.report_page.run_records import WholeRun
from safetrain.watch.report_page.shown import Ended, Fact, GoneOn

STOPPED = "stopped"  # the cause, where somebody has asked for it
MOST_LINES = 40
RUNG_STEP = re.compile(r"step (\d+): ")


def has_gone_on(records: WholeRun) -> bool:
    """Whether what ended has been followed by a process that finished, that trains, or whose end nobody has seen."""
    if records.summary is not None or records.begun:
        return True
    found = records.death
    began = max((each.wall_seconds for each in records.happenings if each.kind == BEGUN), default=0.0)
    return found is not None and (found.went_on or found.ended_seconds < began)


def death_shown(records: WholeRun) -> Ended | None:
    """The verdict on the training that ended before its time; None where there is none that is about this run."""
    found = records.death
    past = has_gone_on(records)
    if found is None or (past and not continuations(records) and not rungs_of(records)):
        return None
    when = datetime.fromtimestamp(found.ended_seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    kept = f"everything up to step {found.resumes_from_step:,}" if found.resumes_from_step else "no checkpoint yet"
    facts = [Fact("where", _place(found)), *_memory(found)]
    if found.replay is not None:
        facts.append(Fact("repeated", _repeated(found)))
    facts += [] if past else [Fact("kept", kept)]
    evidence = tuple(cut(line) for line in found.evidence[:MOST_LINES])
    title = f"{cut(found.title)} ({found.confidence})"
    stopped = found.cause == STOPPED
    heading = ("It was stopped" if stopped else "It ended badly") + (" once, and went on" if past else "")
    return Ended(
        heading, title, when, tuple(facts), evidence, cut(found.advice), found.next_command, past,
        is_bad=not past and not stopped,
    )  # fmt: skip


def continuations(records: WholeRun) -> tuple[MarkedValue, ...]:
    """The updates from which a process has continued, each once."""
    steps = [each.step for each in records.happenings if each.kind == BEGUN and each.step]
    if records.summary is not None and records.summary.outcome.resumed_from_step:
        steps.append(records.summary.outcome.resumed_from_step)
    rungs = [int(found[1]) for text in rungs_of(records) if (found := RUNG_STEP.match(text)) and found[1] != "0"]
    marks = {float(step): MarkedValue("", float(step), 5) for step in rungs}
    marks |= {float(step): MarkedValue("", float(step), 4) for step in steps}
    return tuple(marks[step] for step in sorted(marks))


def rungs_of(records: WholeRun) -> tuple[str, ...]:
    """What was given up for memory, and after the GPU watchdog, in words."""
    return (*_memory_rungs(records), *_gpu_rungs(records))


def _memory_rungs(records: WholeRun) -> tuple[str, ...]:
    if records.summary is not None:
        return records.summary.outcome.memory_rungs
    rungs = records.job.rungs if records.job is not None else ()
    return tuple(f"step {rung.at_step}: {rung.failed}: {rung.evidence}" for rung in rungs)


def _gpu_rungs(records: WholeRun) -> tuple[str, ...]:
    if records.summary is not None:
        return records.summary.outcome.gpu_rungs
    return records.job.gpu_rungs if records.job is not None else ()


def gone_on_shown(records: WholeRun) -> GoneOn | None:
    """What happened on the way; None of a run that was never interrupted."""
    lines = [f"{cut(text)}; it went on with less" for text in _memory_rungs(records)]
    lines += [cut(text) for text in _gpu_rungs(records)]
    if records.summary is not None:
        settings, outcome = records.summary.settings, records.summary.outcome
        if outcome.memory_rungs:
            lines.append(f"it finished with micro-batches of {settings.batch_size} x "
                         f"{settings.gradient_accumulation} rows per update, at most {settings.max_seq_length:,} "
                         "tokens each")  # fmt: skip
        if outcome.resumed_from_step:
            lines.append(f"the last process continued from step {outcome.resumed_from_step:,}")
        if outcome.skipped_updates:
            lines.append(f"{counted(outcome.skipped_updates, 'update')} not applied, for their loss or gradient")
        if outcome.stopped_early:
            lines.append(f"stopped early at step {records.summary.metrics.steps:,}: validation no longer improved")
    elif records.job is not None and records.job.rungs:
        lines.append(f"the last process had {memory_shape(records.job.settings)}")
    lines += [f"ended at step {each.step:,}: {cut(each.text)}" for each in records.happenings if each.kind == DIED]
    death = death_shown(records) if has_gone_on(records) else None
    return GoneOn(tuple(lines[:MOST_LINES]), death) if lines or death else None


def _place(found: PostMortem) -> str:
    text = found.phase + (f" of step {found.step:,}" if found.step else "")
    if found.rows:
        text += f", micro-batch {found.micro_batch}: {counted(found.rows, 'row')}, {counted(found.tokens, 'token')}"
    if found.row_ids:
        more = ", …" if found.rows > len(found.row_ids) else ""
        text += f" (data/validated/train.jsonl:{', '.join(map(str, found.row_ids))}{more})"
    return text


def _memory(found: PostMortem) -> list[Fact]:
    if not found.footprint_bytes:
        return []
    kind = "private memory" if found.limit_name == OWN_LIMIT else "process memory"
    used = f"{size_text(found.footprint_bytes)} of {size_text(found.limit_bytes)} ({found.limit_name})"
    mlx = f"mlx {size_text(found.mlx_active_bytes)}, its peak {size_text(found.mlx_peak_bytes)}"
    if found.predicted_peak_bytes:
        mlx += f", predicted {size_text(found.predicted_peak_bytes)}"
    return [Fact(kind, used, mlx)]


def _repeated(found: PostMortem) -> str:
    replay = found.replay
    if replay is None or not replay.died_in:
        return "the same batch passes when it is computed alone"
    if not replay.largest_rows:
        return f"dies in {replay.died_in} ({replay.cause}); nothing smaller passes either"
    size = f"{counted(replay.largest_rows, 'row')} of at most {counted(replay.largest_tokens, 'token')}"
    return f"dies in {replay.died_in} ({replay.cause}); the largest that passes: {size}"
