"""The configuration with its reasons, and the commands that do it again. Pure."""

import dataclasses
import shlex
from typing import Any

from safetrain.core.formatting import override
from safetrain.core.records.job import MEMORY_ONLY
from safetrain.core.records.settings import ALL_LINEAR, Recommendation, TrainSettings
from safetrain.watch.report_page.endings_shown import rungs_of
from safetrain.watch.report_page.run_records import WholeRun
from safetrain.watch.report_page.shown import AbsentPart, AgainCommand, Configuration, SettingShown

RECOMMENDED, YOU, RUNG, FIXED = "recommended", "you", "a rung", "params.yaml"  # who decided a value


def settings_of(settings: TrainSettings) -> dict[str, str]:
    """Every value by its key in params.yaml, as text."""
    found = dict[str, str]()
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found |= {f"lora.{each.name}": value_of(getattr(value, each.name)) for each in dataclasses.fields(value)}
        else:
            found[f"train.{field.name}"] = value_of(value)
    return found


def value_of(value: Any) -> str:
    """As params.yaml has it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return (
        ", ".join(map(str, value))
        if isinstance(value, tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def recommended_values(plan: Recommendation) -> dict[str, str]:
    """The recommended ones by their key."""
    names = [
        field.name for field in dataclasses.fields(TrainSettings) if hasattr(plan, field.name) and field.name != "lora"
    ]
    found = {f"train.{name}": value_of(getattr(plan, name)) for name in names}
    lora = {f"lora.{each.name}": value_of(getattr(plan.lora, each.name)) for each in dataclasses.fields(plan.lora)}
    return found | lora


def configuration_shown(records: WholeRun) -> Configuration | AbsentPart:
    """What ran, or what is planned, with the reason of each value that has one."""
    plan, settings = records.plan, records.settings
    if plan is None and settings is None:
        return AbsentPart("Nothing has been planned here yet.", "dvc repro recommend_config")
    recommended = recommended_values(plan) if plan is not None else {}
    reasons = {_key(reason.key): reason.text for reason in plan.reasons} if plan is not None else {}
    values = settings_of(settings) if settings is not None else recommended
    on_a_rung = {f"train.{name}" for name in (*MEMORY_ONLY, "max_seq_length")} if rungs_of(records) else set[str]()
    found = list[SettingShown]()
    for key, value in values.items():
        if key not in recommended:
            found.append(SettingShown(key, value, FIXED, ""))
        elif value == recommended[key]:
            found.append(SettingShown(key, value, RECOMMENDED, reasons.get(key, "")))
        else:
            decided = RUNG if key in on_a_rung else YOU
            found.append(SettingShown(key, value, decided, f"recommended was {recommended[key]}"))
    order = {YOU: 0, RUNG: 0, RECOMMENDED: 1, FIXED: 2}
    found.sort(key=lambda setting: order[setting.decided])
    note = "" if settings is not None else "The plan: no training has begun with it."
    return Configuration(tuple(found), note)


def _key(reason: str) -> str:
    return reason if "." in reason else f"train.{reason}"


def again_shown(records: WholeRun) -> tuple[AgainCommand, ...]:
    """How to do it again, here and with exactly these values."""
    found = [AgainCommand("dvc repro", "the whole pipeline; what has not changed is not done again")]
    if records.summary is not None:
        settings = records.summary.settings
        values = {
            **{f"train.{f.name}": getattr(settings, f.name) for f in dataclasses.fields(settings) if f.name != "lora"},
            **{f"lora.{f.name}": getattr(settings.lora, f.name) for f in dataclasses.fields(settings.lora)},
        }
        words = [_word(key, value) for key, value in values.items() if value != (ALL_LINEAR,)]
        model = override("model.path", records.summary.outcome.base_model)
        data = [override("data.path", records.data.source)] if records.data is not None else []
        command = " ".join(["safetrain run", model, *data, *words])
        found.append(AgainCommand(command, "exactly these values, whatever params.yaml and the recommendation say"))
    found.append(AgainCommand("safetrain report", "this page"))
    return tuple(found)


def _word(key: str, value: Any) -> str:
    if isinstance(value, tuple):
        return shlex.quote(f"{key}=[{','.join(value)}]")
    return override(key, value_of(value) if value is None or isinstance(value, bool) else value)
