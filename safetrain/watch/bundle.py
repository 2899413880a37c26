"""A zip for a bug report: what a run recorded, without rows, answers, paths, names and secrets. It holds no lock."""

import json
import re
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted
from safetrain.core.model.config import (
    DEPTH,
    FEED_FORWARD,
    HEAD_SIZE,
    HEADS,
    KEY_HEADS,
    POSITIONS,
    VOCABULARY,
    WIDTH,
)
from safetrain.core.protocol.flight import FlightRecord, read_flight
from safetrain.core.records.metrics import COLUMNS
from safetrain.core.records.schema import keys_of
from safetrain.core.storage import paths
from safetrain.core.storage.files import require_new, write_atomic
from safetrain.core.storage.run_files import (
    DIED_JOB,
    ERROR,
    FLIGHT,
    JOB,
    LADDER,
    MARKER,
    POINTER,
    POSTMORTEM,
    RECORDER,
    STACKS,
)
from safetrain.watch.redaction import Redaction

Prepare = Callable[[Any], Any]  # from a record as it was read to what may stay of it

MOST_BYTES, MOST_LINES, LAST_LINES, LAST_RECORDS = 256 * 1024, 2000, 200, 400
PACKAGES = (
    "safetrain", "mlx", "mlx-lm", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "transformers", "tokenizers",
    "numpy", "dvc", "hydra-core", "omegaconf", "huggingface-hub", "jinja2", "matplotlib", "psutil", "rich", "typer",
    "scipy-openblas32", "pyarrow", "gguf", "peft", "torch", "wandb", "mlflow", "mlflow-skinny", "tensorboard",
)  # fmt: skip
KEPT = "kept"  # text that was looked at already
# The keys of each file whose text we write ourselves.
CHOICES = "method optimizer schedule on_bad_update compute_dtype targets trace level opened_by blas"
SETTINGS = frozenset(CHOICES.split())
FACTS = "system architecture python chip backend device mlx mlx_lm versions version compute_dtype"
MACHINE = frozenset((*FACTS.split(), "quantized_compute_dtype"))
PLAN = SETTINGS | {"name", "reasons", "planned_method", "planned_optimizer", "planned_backend"}
VERDICT = frozenset(("cause", "title", "confidence", "phase", "limit_name", "died_in", KEPT))
MODEL = frozenset(("model_type", "hidden_act", "torch_dtype", "dtype", "quant_method", "mode"))
MODEL_KEYS = frozenset((  # of config.json, which anybody may add to
    *WIDTH, *DEPTH, *HEADS, *KEY_HEADS, *HEAD_SIZE, *FEED_FORWARD, *VOCABULARY, *POSITIONS, *MODEL, "text_config",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "rms_norm_eps", "rope_theta", "rope_scaling", "factor",
    "sliding_window", "layer_types", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
    "final_logit_softcapping", "logit_scale", "logits_scaling", "quantization", "quantization_config", "group_size",
    "bits",
))  # fmt: skip
CHECKS = frozenset(("id", "status", "level", KEPT))
DATA = frozenset(("id", "severity", "format"))
RUN = frozenset(("checkpoint", KEPT))
OUR_FILES = re.compile(
    r"(?:(?:damaged_)?checkpoint_epoch_\d+_step_\d+|adapters|plots|flight|bad_updates)/"
    r"(?:\w+\.(?:json|safetensors|png|svg|bin|txt)|reserve)|(?:training_\w+|evaluation|machine|memory_ladder|postmortem|recommended_config|preflight_report|data_report)"
    r"\.(?:json|csv)|report\.html|README\.md|\.training\.lock|\.dry-runs\.lock"
)
# What a check has found is our own words about the machine; about data and models it may quote names.
TELLING_CHECKS = ("PY-", "DEP-", "HW-", "CPU-", "ENV-", "MAC-", "MEM-", "DISK-")


@dataclass(frozen=True)
class Item:
    """A file of the bundle."""

    name: str
    about: str
    text: str


@dataclass(frozen=True)
class Bundle:
    """What was written, for people to look at before they send it."""

    path: Path
    items: tuple[Item, ...]
    size_bytes: int


def write_bundle(out: Path, machine: Mapping[str, Any], redaction: Redaction) -> Bundle:
    """Write the bundle of the project that this process is in; ``machine`` is what the system says of itself."""
    if out.suffix != ".zip":
        raise ConfigError("The bundle is a zip file.", where=str(out), do=f"name it {out.with_suffix('.zip').name}")
    require_new(out, do="choose another name, or remove it")
    items = tuple(item for item in _items(dict(machine), redaction) if item.text)
    items = (Item("README.txt", "this list", _readme(items)), *items)

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file:
            for item in items:
                file.writestr(zipfile.ZipInfo(item.name), item.text, zipfile.ZIP_DEFLATED)

    write_atomic(out, write, over=False)
    return Bundle(out, items, out.stat().st_size)


def _readme(items: Iterable[Item]) -> str:
    lines = [f"{item.name:<26} {item.about}" for item in items]
    return "\n".join([
        "What `safetrain diagnose --bundle` has found here. Numbers, and words of safetrain itself.",
        "Left out: rows, answers, names of files, folders, users and hosts, secrets, the environment.", "", *lines, "",
    ])  # fmt: skip


def _items(machine: Mapping[str, Any], redaction: Redaction) -> Iterator[Item]:
    def record(name: str, about: str, path: Path, texts: frozenset[str], prepare: Prepare = _as_it_is) -> Item:
        return Item(name, about, _record(path, redaction, texts, prepare))

    output, flight = paths.OUTPUT, paths.OUTPUT / FLIGHT
    yield Item("versions.json", "versions of the packages", _json(dict(_versions())))
    yield Item("system.json", "what the system says of itself", _json(redaction.record(dict(machine), MACHINE)))
    yield record("machine.json", "what the plan was made for", paths.MACHINE, MACHINE)
    yield Item("params.json", "params.yaml: numbers and choices", _configuration(redaction))
    yield Item("model.json", "the base model's architecture", _model(redaction))
    yield record("preflight.json", "the checks before the training", paths.PREFLIGHT_REPORT, CHECKS, _checks)
    yield record("data_report.json", "counts and lengths of rows, kinds of findings", paths.DATA_REPORT, DATA)
    yield record("recommended_config.json", "recommended values, each with its reason", paths.RECOMMENDED_CONFIG, PLAN)
    yield record("job.json", "what the training was asked to do", flight / JOB, PLAN)
    yield record("died_job.json", "the same of the training that died", flight / DIED_JOB, PLAN)
    yield record("memory_ladder.json", "what was changed after running out of memory", output / LADDER, PLAN)
    verdict, marker = _verdict(redaction), _marker(redaction)
    yield record("verdict.json", "why the last training ended badly", output / POSTMORTEM, VERDICT, verdict)
    yield record("unclosed.json", "a training that runs, or ended without a word", flight / MARKER, RUN, marker)
    yield record("training_state.json", "how far it is", output / POINTER, RUN, _without_settings)
    yield record("training_metrics.json", "final losses", paths.METRICS_JSON, RUN)
    yield record("training_summary.json", "the finished training", paths.SUMMARY, PLAN)
    yield record("evaluation.json", "scores of base and tuned, no answers", paths.EVALUATION, RUN, _scores)
    yield Item("training_metrics.csv", "the steps; of a long run a part", _metrics(paths.METRICS_CSV))
    yield Item("flight.csv", "the last phases of the training process, with its memory", _flight(flight / RECORDER))
    yield Item("stacks.txt", "where Python was", redaction.stack(_read(flight / STACKS)))
    yield Item("error.txt", "where a library's error was raised", redaction.stack(_read(flight / ERROR)))
    yield Item("files.txt", "sizes of the run's files", "\n".join(_files(output, redaction)))


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _read(path: Path) -> str:
    """The beginning of a text file; empty where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _as_it_is(value: Any) -> Any:
    return value


def _record(path: Path, redaction: Redaction, texts: frozenset[str], prepare: Prepare = _as_it_is) -> str:
    try:
        if path.stat().st_size > 16 * MOST_BYTES:
            return f"(left out: {path.stat().st_size} bytes)\n"
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f"(cannot be read: {type(error).__name__})\n"
    return _json(redaction.record(prepare(value), texts))[:MOST_BYTES]


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _parameters() -> dict[str, Any] | str:
    """params.yaml, or why it cannot be read."""
    import yaml

    try:
        value = yaml.safe_load(_read(Path("params.yaml")))
    except yaml.YAMLError as error:
        return f"(cannot be read: {type(error).__name__})\n"
    return value if isinstance(value, dict) else ""


def _configuration(redaction: Redaction) -> str:
    value = _parameters()
    if isinstance(value, str):
        return value
    sections = {section: value[section] for section in keys_of("") if isinstance(value.get(section), dict)}
    ours = {section: {key: given.get(key) for key in keys_of(section)} for section, given in sections.items()}
    if "data" in ours:
        ours["data"]["columns"] = ours["data"]["columns"] is not None  # the keys of rows
    return _json(redaction.record(ours, SETTINGS))


def _model(redaction: Redaction) -> str:
    """The sizes in config.json of the base that the last training had, else of params.yaml."""
    value = _parameters()
    try:
        base = json.loads(_read(paths.OUTPUT / FLIGHT / JOB))["base"]
    except (ValueError, KeyError, TypeError):
        base = value.get("model", {}).get("path") if isinstance(value, dict) else None
    return _record(Path(str(base)) / "config.json", redaction, MODEL, _architecture) if base else ""


def _architecture(config: Any) -> Any:
    """Without what names anything, as the labels of a classifier do."""
    if not isinstance(config, dict):
        return None
    return {
        key: _architecture(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key in MODEL_KEYS
    }


def _checks(report: Any) -> Any:
    """Of checks about the machine what was found; of the others only whether they passed."""
    if not isinstance(report, dict):
        return None
    checks = list[dict[str, Any]]()
    for check in report.get("checks", ()):
        told = {name: check.get(name) for name in ("id", "status", "critical")}
        if str(check.get("id")).startswith(TELLING_CHECKS):
            told[KEPT] = [str(check.get("found")), str(check.get("needed"))]
        checks.append(told)
    return {**report, "checks": checks}


def _verdict(redaction: Redaction) -> Prepare:
    def prepare(found: Any) -> Any:
        if not isinstance(found, dict):
            return None
        lines = [str(line) for line in found.get("evidence") or ()]
        quoted = found.get("quoted", lines)  # a verdict that does not say may have quoted everything
        told = [redaction.evidence(line, quoted=line in quoted) for line in lines]
        return {
            **{key: value for key, value in found.items() if key not in ("evidence", "quoted", "next_command")},
            "evidence": {KEPT: told},
            "next_command": {KEPT: redaction.command(str(found.get("next_command", "")))},
        }

    return prepare


def _marker(redaction: Redaction) -> Prepare:
    def prepare(marker: Any) -> Any:
        if not isinstance(marker, dict):
            return None
        return {
            "started_seconds": marker.get("started_seconds"),
            "command": {KEPT: redaction.command(str(marker.get("command", "")))},
        }

    return prepare


def _without_settings(state: Any) -> Any:
    return {key: state.get(key) for key in ("finished", "checkpoint", "step")} if isinstance(state, dict) else None


def _scores(evaluation: Any) -> Any:
    """Without answers, and without the places that name files."""
    if not isinstance(evaluation, dict):
        return None
    return {key: value for key, value in evaluation.items() if not isinstance(value, list)}


def _metrics(path: Path) -> str:
    """The header, lines at equal distances, and the last ones; whatever is no number is not there."""
    if not path.is_file():
        return ""
    kept, last, stride = list[tuple[int, str]](), deque[tuple[int, str]](maxlen=LAST_LINES), 1
    with path.open(encoding="utf-8", errors="replace") as file:
        header = file.readline(4096).strip()
        for number, line in enumerate(file):
            last.append((number, line))
            if number % stride == 0:
                kept.append((number, line))
            if len(kept) >= 2 * MOST_LINES:
                kept, stride = kept[::2], 2 * stride
    names = [name if name in COLUMNS else "(left out)" for name in header.split(",")]
    return "\n".join([",".join(names), *(_numbers(line) for _, line in sorted({*kept, *last})), ""])


def _numbers(line: str) -> str:
    return ",".join(field if _is_number(field) else "(left out)" for field in line.strip().split(",", 31))


def _is_number(field: str) -> bool:
    try:
        return len(field) < 40 and (not field or float(field) is not None)
    except ValueError:
        return False


def _flight(path: Path) -> str:
    found = read_flight(path)
    if found is None:
        return ""
    header = "wall_seconds,phase,edge,step,micro_batch,rows,tokens,predicted_peak,active,peak,cache,footprint,data,loss"
    return "\n".join([header, *map(_flown, found[1][-LAST_RECORDS:]), ""])


def _flown(one: FlightRecord) -> str:
    work, mlx = one.work, one.allocator
    sizes = (one.predicted_peak_bytes, mlx.active_bytes, mlx.peak_bytes, mlx.cache_bytes, one.footprint_bytes)
    numbers = (work.step, work.micro_batch, work.rows, work.tokens, *sizes, one.data_bytes)
    texts = (f"{one.wall_seconds:.3f}", one.phase.label, one.edge.name.lower(), *map(str, numbers), f"{one.loss:.6g}")
    return ",".join(texts)


def _files(output: Path, redaction: Redaction) -> Iterator[str]:
    """Sizes, by names that we have given; whoever put others there named them."""
    others = number = 0
    for path in sorted(output.rglob("*")) if output.is_dir() else ():
        name = path.relative_to(output)
        if not path.is_file():
            continue
        known = OUR_FILES.fullmatch(str(name)) is not None and redaction.text(str(name)) == str(name)
        number += known
        others += not known
        if known and number <= MOST_LINES:
            yield f"{path.stat().st_size:>14} {name}"
    if others:
        yield f"and {counted(others, 'other file')}"
