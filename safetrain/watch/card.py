"""The model card of a folder for the Hub: README.md, with measured results. No rows, no paths on this machine."""

import json
from pathlib import Path

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import dvc, size_text
from safetrain.core.model.files import hub_id_of
from safetrain.core.records.adapter_files import PromptFormat, adapter_method, base_of, fingerprint, read_prompt_format
from safetrain.core.records.evaluation import describe_forgetting
from safetrain.core.records.fusing import EXPORT_REPORT, REPORT, ExportReport
from safetrain.core.run_folder import Run
from safetrain.core.storage import paths
from safetrain.core.storage.files import json_object, read_result, write_text
from safetrain.watch.result import describe_scores

CARD = "README.md"
AGAIN = "fuse or export it again, into another folder"


def write_card(folder: Path, adapter: Path | None, base: Path | None, run: Run, *, replace: bool = False) -> list[str]:
    """Write README.md into ``folder``; return remarks on what is missing. Raises ConfigError, ModelError.

    ``adapter``: the one the folder was made from; None for the folder itself or the run's. ``base``: None for the
    adapter's own. The card has results if the run's evaluation is about this adapter.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    path, kind = folder / CARD, _kind_of(folder)
    if path.exists() and not replace:
        raise ConfigError("There is a README.md already.", where=str(path), do="move it away, or use --replace")
    reports = _reports(folder, kind)
    own = _adapter_of(folder, kind, adapter, [report.adapter_fingerprint if report else "" for report in reports])
    base, scores = base or base_of(own), run.evaluation
    if scores is not None and scores.adapter != fingerprint(own):
        scores = None
    license_of_base = _license(base)
    lines = [*describe_scores(scores), f"{describe_forgetting(scores.forgetting)}."] if scores is not None else []
    environment = Environment(
        loader=PackageLoader("safetrain.watch"), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    text = environment.get_template("card.md").render(
        kind=kind, hub_id=hub_id_of(base), base_name=base.name, license=license_of_base, method=adapter_method(own),
        title=folder.resolve().name, prompts=read_prompt_format(own) or PromptFormat((), ""), scores=scores,
        summary=run.summary, lines=lines, fused=reports[0] if kind == "mlx" else None, size_text=size_text,
        quoted=json.dumps,
    )  # fmt: skip
    write_text(path, text)
    remarks = [] if license_of_base else ["the card has no licence: add the base model's"]
    if scores is None:
        other = run.evaluation is not None or run.has_stale_evaluation
        why = f"{paths.EVALUATION} is about another adapter" if other else f"no evaluation yet ({dvc()} repro)"
        remarks.append(f"the card has no results: {why}")
    if not all(reports):
        remarks.append("nothing in the folder shows that it was made from this adapter, or what it keeps")
    return remarks


def _kind_of(folder: Path) -> str:
    config = folder / "adapter_config.json"
    if config.is_file():
        return "peft" if "peft_type" in json_object(config) else "mlx-adapter"
    if any(folder.glob("*.gguf")):
        return "gguf"
    if any(folder.glob("*.safetensors")) and (folder / "config.json").is_file():
        return "mlx"
    expected = "what 'safetrain fuse' or 'safetrain export' writes, or an adapter folder"
    raise ConfigError("This folder has no model.", where=str(folder), expected=expected, do="safetrain fuse OUT")


def _reports(folder: Path, kind: str) -> list[ExportReport | None]:
    """Reports on the folder's models, None for a missing one; raises ConfigError for one that cannot be read."""
    files = {"mlx": [folder / REPORT], "peft": [folder / EXPORT_REPORT]}.get(kind, [])
    if kind == "gguf":  # each file has its own
        files = [path.with_name(f"{path.name}.json") for path in sorted(folder.glob("*.gguf"))]
    return [read_result(path, "", ExportReport, AGAIN) if path.is_file() else None for path in files]


def _adapter_of(folder: Path, kind: str, adapter: Path | None, fingerprints: list[str]) -> Path:
    """The adapter in the folder, checked by the fingerprints in its reports; raises ConfigError for another one."""
    if kind == "mlx-adapter":
        return folder
    if adapter is None and not all(fingerprints):
        what = "No file in this folder says which adapter it was made from."
        raise ConfigError(what, where=str(folder), do="name that adapter with --adapter")
    adapter = adapter or paths.ADAPTERS
    if set(fingerprints) - {"", fingerprint(adapter)}:
        what = "This folder was made from another adapter."
        raise ConfigError(what, where=str(folder), got=str(adapter), do="name the right one with --adapter")
    return adapter


def _license(base: Path) -> str:
    """The licence in the head of the base model's card; empty where it has none."""
    path = base / CARD
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    head = text[4:].partition("\n---")[0] if text.startswith("---\n") else ""
    name = next((line.partition(":")[2].strip() for line in head.splitlines() if line.startswith("license:")), "")
    return name if name.replace("-", "").replace(".", "").isalnum() else ""
