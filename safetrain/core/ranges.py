"""Which values a key of the configuration accepts, in code and in words."""

import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.core.records.schema import CHOICES, OF_START, PAIRED, PRETRAIN, RANGE, WHOLE, Pipeline

COMPARE = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le}
LIST = "a list of texts"
COLUMNS = "the key of each part of a row, e.g. {prompt: frage, completion: antwort}, or null"


def check_ranges(config: Pipeline) -> None:
    """Raise one ConfigError that names every key whose value is out of its range."""
    sections = [(section.name, getattr(config, section.name)) for section in dataclasses.fields(config)]
    problems = [problem for name, part in sections for problem in _impossible(name, part)]
    train, lora, method = config.train, config.lora, f"train.method = {config.train.method}"
    if config.model.tokenizer and not config.model.create:
        problems.append("model.tokenizer is set without model.create, which would copy it")
    if lora.targets is not None and not lora.targets:
        problems.append("lora.targets is an empty list; allowed: null (all linear layers), or at least one name")
    if train.method in WHOLE:
        shape = ("rank", "scale", "dropout", "targets", *(("num_layers",) if train.method == PRETRAIN else ()))
        pinned = [key for key in shape if getattr(lora, key) is not None]
        problems += [f"lora.{key} is set with {method}, which has no adapter" for key in pinned]
        problems += [f"train.from_adapter is set with {method}, which has no adapter"] if train.from_adapter else []
        if train.stream_base:
            problems.append(f"train.stream_base is true with {method}, which trains the base")
    if train.stream_base and train.gradient_checkpointing is False:
        problems.append("train.gradient_checkpointing is false with train.stream_base, which recomputes every block")
    if train.from_adapter:
        pinned = [key for key in OF_START if getattr(lora, key) is not None]
        problems += [f"lora.{key} is set with train.from_adapter, which has its own" for key in pinned]
    if train.method in PAIRED:
        problems += [f"lora.dropout is set with {method}, which compares two answers"] if lora.dropout else []
        if train.batch_size and train.gradient_accumulation and train.batch_size * train.gradient_accumulation % 2:
            problems.append(f"train.batch_size x gradient_accumulation is odd; with {method}, two rows are a pair")
    if train.optimizer == "adam" and train.weight_decay:
        problems.append("train.weight_decay is not 0 with train.optimizer = adam, which has no weight decay: use adamw")
    if train.minutes and train.max_steps:
        problems.append("train.minutes and train.max_steps are both set, in params.yaml or overrides: set one to null")
    problems += [train.lacks_rate] if train.lacks_rate else []
    if problems:
        what = "\n  ".join(["The configuration has invalid values:", *problems])
        raise ConfigError(what, do="correct them in params.yaml, in the overlay, or on the command line")


def _impossible(section: str, part: Any) -> Iterator[str]:
    """Say what is wrong with the values of a section, key by key."""
    for key in dataclasses.fields(part):
        value, limits = getattr(part, key.name), key.metadata.get(RANGE, {})
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        in_range = not limits or (is_number and all(COMPARE[word](value, end) for word, end in limits.items()))
        is_empty = isinstance(value, str) and not value.strip()
        is_null = value is None and _is_optional(key)
        if not is_null and (is_empty or not in_range or value not in key.metadata.get(CHOICES, (value,))):
            what = "is empty" if is_empty else f"= {value}"
            yield f"{section}.{key.name} {what}; allowed: {describe_allowed(section, key.name)}"


def _is_optional(key: dataclasses.Field[Any]) -> bool:
    return "None" in str(key.type)


def is_text(section: str, key: str) -> bool:
    """Whether the key's value is one text, such as a path."""
    return any(field.name == key and field.type in (str, str | None) for field in _fields_of(section))


def describe_allowed(section: str, key: str) -> str:
    """The values that a key accepts, in words: ``a whole number, at least 1 and at most 1024, or null``."""
    found = next((field for field in _fields_of(section) if field.name == key), None)
    if found is None:
        return ""
    kind = str(found.type) if not isinstance(found.type, type) else found.type.__name__
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "Any": COLUMNS}
    text = words.get(kind.split(" | ")[0], LIST)
    if CHOICES in found.metadata:
        text = " or ".join(map(str, found.metadata[CHOICES]))
    ends = [f"{word.replace('_', ' ')} {end:.12g}" for word, end in found.metadata.get(RANGE, {}).items()]
    return ", ".join([text, *([" and ".join(ends)] if ends else []), *(["or null"] if _is_optional(found) else [])])


def keys_of(section: str) -> list[str]:
    """List the keys of a section, or the sections for an empty name."""
    return [field.name for field in _fields_of(section) or dataclasses.fields(Pipeline)]


def _fields_of(section: str) -> tuple[dataclasses.Field[Any], ...]:
    kind = next((field.type for field in dataclasses.fields(Pipeline) if field.name == section), None)
    return dataclasses.fields(kind) if isinstance(kind, type) else ()
