"""The model card of a folder for the hub: README.md, with what was measured. No row, no path of this machine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted, size_text
from safetrain.core.model.source import hub_id_of
from safetrain.core.records.adapter_files import Taught, adapter_method, base_of, fingerprint, read_taught
from safetrain.core.records.evaluation import Evaluation, Score, describe_forgetting, describe_improvement
from safetrain.core.records.exporting import GgufReport
from safetrain.core.records.fusing import REPORT, FuseReport
from safetrain.core.records.peft_report import REPORT as EXPORT_REPORT
from safetrain.core.records.peft_report import PeftReport
from safetrain.core.records.record_files import from_json, read_beside, read_result
from safetrain.core.records.schema import PRETRAIN, WHOLE
from safetrain.core.storage.files import write_text

CARD = "README.md"
RELATIONS = {"mlx": "finetune", "gguf": "quantized", "peft": "adapter", "mlx-adapter": "adapter"}
Report = FuseReport | PeftReport | GgufReport
REPORTS: dict[str, tuple[type[Report], str]] = {  # and what writes them again
    "mlx": (FuseReport, "fuse it again, into another folder: safetrain fuse OUT"),
    "peft": (PeftReport, "export it again, into another folder: safetrain export peft OUT"),
    "gguf": (GgufReport, "export it again, to another file: safetrain export gguf OUT.gguf"),
}
PATH_KEYS = ("model", "base_model", "base_model_name_or_path", "_name_or_path", "name_or_path")


@dataclass(frozen=True)
class Records:
    """Where a run has left what it measured, and the adapter that it trained."""

    evaluation: Path
    summary: Path
    adapter: Path


def write_card(
    folder: Path, adapter: Path | None, base: Path | None, records: Records, *, replace: bool = False
) -> list[str]:
    """Write README.md into ``folder``; remarks on what could not be said. Raises ConfigError, ModelError.

    ``adapter``: that the folder was made from; None for an adapter's own folder, or the one that the run trained.
    ``base``: None for the adapter's own. Results stand in the card where they are about this adapter. ``replace``:
    over a README.md that is there.
    """
    path, kind = folder / CARD, _kind_of(folder)
    if path.exists() and not replace:
        raise ConfigError("There is a README.md already.", where=str(path), do="move it away, or --replace")
    reports = _reports(folder, kind)
    own = _adapter_of(
        folder, kind, adapter, records.adapter, [each.adapter_fingerprint if each else None for each in reports]
    )
    card = _Card(folder, kind, own, base or base_of(own), records, reports)
    write_text(path, card.text())
    return card.remarks


def _kind_of(folder: Path) -> str:
    config = folder / "adapter_config.json"
    if config.is_file():
        return "peft" if "peft_type" in _json(config) else "mlx-adapter"
    if any(folder.glob("*.gguf")):
        return "gguf"
    if any(folder.glob("*.safetensors")) and (folder / "config.json").is_file():
        return "mlx"
    raise ConfigError(
        "There is no model in this folder.",
        where=str(folder),
        expected="what 'safetrain fuse' or 'safetrain export' writes, or an adapter folder",
        do="safetrain fuse OUT",
    )


def _report_paths(folder: Path, kind: str) -> list[Path]:
    """Where the reports on the folder's models are, of a GGUF file each its own."""
    if kind == "gguf":
        return [path.with_name(f"{path.name}.json") for path in sorted(folder.glob("*.gguf"))]
    return {"mlx": [folder / REPORT], "peft": [folder / EXPORT_REPORT]}.get(kind, [])


def _reports(folder: Path, kind: str) -> list[Report | None]:
    """These reports, None for one that is missing; raises ConfigError for one that cannot be read."""
    found = list[Report | None]()
    for path in _report_paths(folder, kind):
        form, again = REPORTS[kind]
        found.append(read_beside(path, form, again) if path.is_file() else None)
        if isinstance(report := found[-1], FuseReport) and report.chosen not in {each.name for each in report.tried}:
            raise ConfigError(f"{path.name} has no figures of {report.chosen}.", where=str(path), do=again)
    return found


def _adapter_of(folder: Path, kind: str, given: Path | None, trained: Path, prints: list[str | None]) -> Path:
    """The adapter that is in the folder, by the fingerprints of its reports; raises ConfigError for another one."""
    if kind == "mlx-adapter":
        if given is not None and fingerprint(given) != fingerprint(folder):
            raise ConfigError("This folder is an adapter by itself, and another one than --adapter.",
                              where=str(folder), do="leave --adapter out")  # fmt: skip
        return folder
    if given is None and not all(prints):
        raise ConfigError("Nothing in this folder says which adapter it was made from.", where=str(folder),
                          do="name that adapter with --adapter")  # fmt: skip
    chosen = given or trained
    if {each for each in prints if each} - {fingerprint(chosen)}:
        made = "fused" if kind == "mlx" else "exported"
        raise ConfigError(f"This folder was {made} from another adapter.", where=str(folder),
                          got=f"{chosen}, which was not it", do="name that adapter with --adapter")  # fmt: skip
    return chosen


class _Card:
    def __init__(
        self, folder: Path, kind: str, adapter: Path, base: Path, records: Records, reports: list[Report | None]
    ) -> None:
        self._folder, self._kind, self._base, self._records, self._reports = folder, kind, base, records, reports
        self._print, self._method = fingerprint(adapter), adapter_method(adapter)
        self._taught = read_taught(adapter) or Taught((), "")
        self._hub_id, self._license = hub_id_of(base), _license(base)
        self.remarks: list[str] = []

    def text(self) -> str:
        """The whole file."""
        measured = self._measured()
        self._tell_paths()
        parts = [self._head(), self._title(), self._use()]
        parts += [self._result(measured), self._training()] if measured else []
        return "\n".join([*parts, self._kept(), self._limits(measured)]).replace("\n\n\n", "\n\n").rstrip() + "\n"

    def _measured(self) -> Evaluation | None:
        """evaluation.json, if it is about this adapter."""
        if not self._records.evaluation.is_file():
            self.remarks.append("no result stands in it: the adapter has not been evaluated (dvc repro)")
            return None
        found = read_result(self._records.evaluation, "evaluate", lambda value: from_json(Evaluation, value))
        if found.adapter != self._print:
            self.remarks.append(f"no result stands in it: {self._records.evaluation} is about another adapter")
            return None
        return found

    def _head(self) -> str:
        """YAML, as the hub reads it; what is not known is left out."""
        library = self._kind.partition("-")[0]
        lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation"]
        if self._hub_id:
            lines += [f"base_model: {self._hub_id}", f"base_model_relation: {RELATIONS[self._kind]}"]
        if self._license:
            lines.append(f"license: {self._license}")
        else:
            self.remarks.append("no licence stands in it: add the base model's")
        return "\n".join([*lines, "tags:", f"- {library}", "- safetrain", f"- {self._method}", "---", ""])

    def _tell_paths(self) -> None:
        """Beside the card, other files have the base's path as it was given."""
        names = {"adapter_config.json", "config.json", "tokenizer_config.json"}
        for path in [*(self._folder / name for name in sorted(names)), *_report_paths(self._folder, self._kind)]:
            named = _json(path)
            for found in dict.fromkeys(named[key] for key in PATH_KEYS if isinstance(named.get(key), str)):
                if Path(found).is_absolute():
                    self.remarks.append(f"{path.name} has a path of this machine: {found}")

    def _title(self) -> str:
        base = f"[{self._hub_id}](https://huggingface.co/{self._hub_id})" if self._hub_id else self._base.name
        name = self._folder.resolve().name
        if self._method == PRETRAIN:
            return f"# {name}\n\nTrained whole with safetrain, on documents, from the weights of {base}.\n"
        return f"# {name}\n\n{base}, fine-tuned with safetrain ({self._method}). For the base model see its own card.\n"

    def _use(self) -> str:
        name = self._hub_id or self._base.name
        how = {
            "mlx": 'mlx_lm.generate --model THIS_FOLDER --prompt "..."',
            "mlx-adapter": f'mlx_lm.generate --model {name} --adapter-path THIS_FOLDER --prompt "..."',
            "gguf": 'llama-cli -m FILE.gguf -p "..."',
            "peft": f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({name!r}), 'THIS_FOLDER')",
        }[self._kind]
        lines = ["## Use", "", "```", how, "```", ""]
        if self._taught.documents:
            lines += ["It was trained on documents alone: it continues texts, and has not learnt to answer.", ""]
        if self._taught.system:
            lines += ["Every training row had the same system prompt; without it answers may differ.", ""]
        if self._taught.asked or self._taught.opening:
            lines += [
                "It was trained on answers that begin otherwise than the chat template asks for them: behind "
                f"`{json.dumps(self._taught.opening)}` in place of `{json.dumps(self._taught.asked)}`.", "",
            ]  # fmt: skip
        return "\n".join(lines)

    def _result(self, found: Evaluation) -> str:
        lines = [
            "## Result",
            "",
            f"On the test rows, the tuned model is {describe_improvement(found.improvement)}.",
            "",
        ]
        lines += ["| | base | tuned |", "|---|---|---|"]
        lines.append(f"| loss, nats per label | {found.base.loss:.3f} | {found.tuned.loss:.3f} |")
        if found.tuned.exact_match is not None:
            lines.append(
                f"| exact answers of {found.answered}, 95 % interval | {_exact(found.base)} | {_exact(found.tuned)} |"
            )
        said = describe_forgetting(found.forgetting)
        return "\n".join([*lines, "", f"{said[0].upper()}{said[1:]}.", ""])

    def _training(self) -> str:
        summary = _json(self._records.summary)
        lora = summary.get("lora") or {}
        rows = {
            "windows" if self._method == PRETRAIN else "rows": summary.get("train_rows"),
            "labels, over all updates": summary.get("trained_tokens"),
            "method": self._method,
            "rank": lora.get("rank") if self._method not in WHOLE else None,
            "scale": lora.get("scale") if self._method not in WHOLE else None,
            "trained blocks": lora.get("num_layers"),
            "learning rate": summary.get("learning_rate"),
            "optimizer": summary.get("optimizer"),
            "epochs": summary.get("num_epochs"),
            "updates": summary.get("steps"),
            "tokens of a window" if self._method == PRETRAIN else "longest row, tokens": summary.get("max_seq_length"),
            "seed": summary.get("seed"),
        }
        lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
        return "\n".join(["## Training", "", "| | |", "|---|---|", *lines, ""])

    def _kept(self) -> str:
        """What the fused model keeps, as ``safetrain fuse`` measured it."""
        if not all(self._reports):
            self.remarks.append("nothing in the folder shows that it was made from this adapter, nor what it keeps")
        report = next(iter(self._reports), None)
        if not isinstance(report, FuseReport):
            return ""
        taken = next(tried for tried in report.tried if tried.name == report.chosen)
        same = f"{round(taken.likeness.same_answers * report.rows)} of {report.rows}"
        return "\n".join([
            "## What this folder keeps of what was learnt", "",
            f"Written, opened again and compared with base and adapter on {counted(report.rows, 'validation row')}: "
            f"{taken.name}, {size_text(taken.size_bytes)}, keeps {100 * taken.kept:.1f} %.", "",
            "| | loss, nats per label | same answers as the tuned model |", "|---|---|---|",
            f"| base | {report.base.loss:.4f} | {round(report.base.same_answers * report.rows)} of {report.rows} |",
            f"| base and adapter | {report.tuned.loss:.4f} | {report.rows} of {report.rows} |",
            f"| this folder | {taken.likeness.loss:.4f} | {same} |", "",
        ])  # fmt: skip

    def _limits(self, measured: Evaluation | None) -> str:
        text = (
            "## Limits\n\nMeasured on rows of its own data set alone, by loss and exact answers. What the base model "
            "gets wrong, this one may, too."
        )
        return text if measured else f"{text} What it has forgotten of the base was not measured."


def _exact(score: Score) -> str:
    if score.exact_match is None or score.exact_match_low is None or score.exact_match_high is None:
        return ""
    low, high = 100 * score.exact_match_low, 100 * score.exact_match_high
    return f"{100 * score.exact_match:.1f} % ({low:.1f} to {high:.1f})"


def _license(base: Path) -> str:
    """As the head of the base's own card says; empty where it does not."""
    path = base / CARD
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    head = text[4:].partition("\n---")[0] if text.startswith("---\n") else ""
    found = next((line.partition(":")[2].strip() for line in head.splitlines() if line.startswith("license:")), "")
    return found if found.replace("-", "").replace(".", "").isalnum() else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
