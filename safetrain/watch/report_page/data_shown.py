"""The data gate's report and the environment, ready to be shown. Pure."""

from collections.abc import Sequence

from safetrain.core.formatting import size_text
from safetrain.core.records.reports import DataReport, SplitReport
from safetrain.watch.report_page.answers_shown import cut
from safetrain.watch.report_page.charts import SvgChart, length_chart
from safetrain.watch.report_page.run_records import WholeRun
from safetrain.watch.report_page.shown import AbsentPart, DataShown, Fact, FindingShown, Table

MOST_FINDINGS, MOST_PLACES_NAMED = 40, 8
SEVERITIES = ("error", "warning", "note")


def data_shown(records: WholeRun) -> DataShown | AbsentPart:
    """Rows, findings and lengths."""
    data = records.data
    if data is None:
        return AbsentPart("The data has not been validated yet.", "dvc repro validate_data")
    facts = (
        Fact("source", cut(data.source, 200)),
        Fact("format", data.format),
        Fact("split", data.split),
        Fact("answers end with", ", ".join(cut(token, 60) for token in data.stop_tokens) or "nothing"),
        Fact("answers are asked for", cut(data.opening, 200)),
        Fact("date in the template", data.template_date),
    )
    rows = tuple(
        (name, f"{split.rows:,}", f"{split.tokens:,}", f"{split.trained_tokens:,}", f"{split.lengths.p50:,}",
         f"{split.lengths.p95:,}", f"{split.lengths.max:,}")
        for name, split in data.splits
    )  # fmt: skip
    head = ("split", "rows", "tokens", "labels", "median row", "95 %", "longest, tokens")
    order = {name: place for place, name in enumerate(SEVERITIES)}
    found = sorted(data.findings, key=lambda finding: order.get(finding.severity, len(order)))
    findings = tuple(
        FindingShown(
            each.id, each.severity, f"{each.count:,}", cut(each.message), _places(each.where), cut(each.remedy)
        )
        for each in found[:MOST_FINDINGS]
    )
    limit = _limit(records)
    return DataShown(
        facts, Table(head, rows, 6), findings, len(found) - len(findings), _lengths(data, limit),
        _cut_away(data.train, limit),
    )  # fmt: skip


def environment_shown(records: WholeRun) -> tuple[Fact, ...] | AbsentPart:
    """The machine, and what computed."""
    machine = records.machine
    if machine is None:
        return AbsentPart("The machine has not been looked at yet.", "dvc repro preflight")
    found = [
        Fact("machine", f"{machine.chip}, {machine.physical_cores} cores, {size_text(machine.total_memory_bytes)}"),
        Fact("system", f"{machine.system} {machine.architecture}, Python {machine.python}"),
        Fact("backend", " ".join(part for part in (machine.backend, machine.device) if part)),
        Fact("mlx", f"{machine.mlx}; mlx-lm {machine.mlx_lm}"),
    ]
    if records.summary is not None and records.summary.outcome.blas:
        found.append(Fact("BLAS", records.summary.outcome.blas))
    found += [Fact("product of large matrices", f"{machine.gemm_gflops:g} GFLOP/s")] if machine.gemm_gflops else []
    return tuple(found)


def _limit(records: WholeRun) -> int:
    if records.settings is not None:
        return records.settings.max_seq_length
    return records.plan.max_seq_length if records.plan is not None else 0


def _lengths(data: DataReport, limit: int) -> tuple[SvgChart, ...]:
    splits = [(name, split) for name, split in data.splits if split.rows and split.trained_tokens]
    charts = (
        ("Row lengths", "tokens of a row", [(n, s.histogram.edges, s.histogram.rows) for n, s in splits]),
        ("Labels of a row", "labels of a row", [(n, s.histogram.edges, s.histogram.rows_by_labels) for n, s in splits]),
    )
    return tuple(
        length_chart(title, counts, limit, name) for title, name, counts in charts if any(map(_counts, counts))
    )


def _counts(split: tuple[str, Sequence[int], Sequence[int]]) -> bool:
    return sum(split[2]) > 0


def _cut_away(train: SplitReport, limit: int) -> str:
    if not limit or not train.rows:
        return ""
    rows, labels = (train.share_beyond(of, limit) for of in (train.histogram.rows, train.histogram.labels))
    if not rows:
        return f"No row is cut: max_seq_length is {limit:,} tokens, the longest row has {train.lengths.max:,}."
    lost = f"{100 * rows:.2g} % of the training rows and {100 * labels:.2g} % of their labels"
    return f"max_seq_length, {limit:,} tokens, cuts {lost}."


def _places(where: Sequence[str]) -> str:
    named = ", ".join(cut(place, 120) for place in where[:MOST_PLACES_NAMED])
    return named + (", …" if len(where) > MOST_PLACES_NAMED else "")
