"""A stage's configuration: schema, params.yaml, overlay and command line, composed by Hydra, then checked.

Hydra's own command line is not used: of Hydra 1.3.8 it does not start on Python 3.14 (hydra#3121), and a sweep would
write all its results into one folder.
"""

import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from safetrain.core.errors import ConfigError, SafetrainError, broken_yaml
from safetrain.core.foreign import first_line
from safetrain.core.formatting import RUN, in_hydra_quotes, print_text
from safetrain.core.params_file import left_behind, read_params, require_same
from safetrain.core.ranges import LIST, check_ranges, describe_allowed, is_text, keys_of
from safetrain.core.records.schema import RENAMED, Pipeline
from safetrain.core.results import settle
from safetrain.core.signals import exit_code_of, handling, terminate
from safetrain.core.storage import paths
from safetrain.core.storage.paths import shipped

FILES = "params.yaml or an overlay in conf/experiment"
COMMAND_LINE, OVERLAY = "the command line", "experiment"  # where a value comes from
HELP, SHOW = ("-h", "--help"), ["--cfg", "job"]
STAGE = "DVC_STAGE"  # environment variable of DVC
UNREADABLE = (OSError, ValueError, TypeError, AttributeError, RecursionError)  # that the two let through
USAGE = """safetrain stage STAGE [KEY=VALUE …]

Values come from params.yaml, whose comments give the allowed values; the current ones are below. dvc.yaml lists
the keys that each stage reads. KEY=VALUE sets one for this run; experiment=minimal and experiment=smoke set several.
safetrain stage STAGE -- --cfg job shows the values and runs nothing.

Examples:
  safetrain stage validate_data data.path=data/mine.csv 'data.columns={prompt: frage, completion: antwort}'
  safetrain stage train experiment=smoke train.seed=7
"""
ConfigStore.instance().store(name="schema", node=Pipeline)


def stage(function: Callable[[Pipeline], None]) -> Callable[[], None]:
    """Make ``function`` a command: its errors become messages with exit codes; other exceptions print a traceback."""

    @wraps(function)
    def command() -> None:
        code = 0
        with handling({signal.SIGTERM: terminate}):
            try:
                settle()  # DVC has deleted this stage's last result
                if said := left_behind():
                    print_text(said, sys.stderr)
                _run(function, sys.argv[1:])
                settle()
            except (SafetrainError, OSError, KeyboardInterrupt) as error:
                code = exit_code_of(error)
        sys.exit(code)

    return command


def _run(function: Callable[[Pipeline], None], words: list[str]) -> None:
    """Call ``function`` with the configuration, or show the configuration if ``words`` ask for that."""
    known = [word for word in words if word in (*HELP, *SHOW)]
    overrides = [word for word in words if word not in known]
    if unknown := [word for word in overrides if word.startswith("-")]:
        do = "write KEY=VALUE; --help lists the keys"
        raise ConfigError(f"A stage has no option {unknown[0]}.", where=COMMAND_LINE, do=do)
    config = composed(overrides)
    if not known:
        function(to_pipeline(config))
        if os.environ.get(STAGE):
            require_same(config, composed(overrides), os.environ[STAGE])
        elif RUN not in os.environ and Path(sys.argv[0]).stem != "preflight":  # which has its own command
            print("DVC has not recorded this stage, which ran by hand; 'safetrain run' runs all and records them.")
        return
    print(("" if known == SHOW else f"{USAGE}\n") + OmegaConf.to_yaml(config), end="")


def composed(words: Sequence[str]) -> DictConfig:
    """The configuration of this folder with the overrides ``words``; raises ConfigError if it cannot be read."""
    if not Path("params.yaml").is_file():
        do = "go to the project's root, or make a project here: safetrain init"
        raise ConfigError("No params.yaml found.", where=Path.cwd(), do=do)
    read_params()  # what no reader of YAML can take
    conf = Path("conf") if Path("conf/config.yaml").is_file() else shipped("conf")
    overrides = [_for_hydra(word) for word in words if word != f"{OVERLAY}=null"]
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf.resolve())):
            return compose("config", overrides=overrides)
    except yaml.YAMLError as error:
        raise broken_yaml(error) from None
    except (HydraException, OmegaConfBaseException, *UNREADABLE) as error:
        raise config_error(error) from None


def _for_hydra(word: str) -> str:
    """An override in Hydra's grammar; raises ConfigError for an unknown key or several values.

    A text, such as a path, is taken as it was typed. A list or mapping that Hydra cannot read is read as YAML.
    """
    key, sign, value = word.partition("=")
    section, _, name = key.lstrip("+").rpartition(".")
    if not sign or (name in keys_of("") and not section):
        raise ConfigError(f"{word} sets no value.", where=COMMAND_LINE, expected="KEY=VALUE, e.g. train.seed=7")
    if key != OVERLAY and not section.startswith("data.columns"):
        if section not in keys_of(""):
            raise _unknown_key("", section or name, COMMAND_LINE)
        if name not in keys_of(section):
            raise _unknown_key(section, name, COMMAND_LINE)
    if is_text(section, name):
        is_ready = value == "null" or (len(value) > 1 and value[0] == value[-1] and value[0] in "'\"")
        return word if is_ready else f"{key}={in_hydra_quotes(value)}"
    try:
        is_sweep = OverridesParser.create().parse_override(word).is_sweep_override()
    except HydraException:
        return f"{key}={_in_hydra(_from_yaml(value))}" if value[:1] in ("{", "[") else word
    if is_sweep:
        do = "name one value; for several: safetrain run " + word
        raise ConfigError(f"{key} has several values.", where=COMMAND_LINE, got=value, do=do)
    return word


def _from_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        what = f"The configuration cannot be read: {first_line(error)}"
        do = "quote the texts in it, e.g. '{prompt: \"my column\"}'"
        raise ConfigError(what, where=COMMAND_LINE, got=text[:200], do=do) from None


def _in_hydra(value: Any) -> str:
    """A value from YAML in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_in_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_in_hydra, value)) + "]"
    return in_hydra_quotes(value) if isinstance(value, str) else yaml.safe_dump(value).split("\n")[0]


def to_pipeline(config: DictConfig) -> Pipeline:
    """Convert to the schema's dataclasses and check ranges; raises ConfigError."""
    try:
        pipeline = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # a key without a value
        raise config_error(error) from None
    if not isinstance(pipeline, Pipeline):
        raise ConfigError("The configuration does not follow the schema.", where="conf/config.yaml")
    check_ranges(pipeline)
    score = pipeline.evaluate
    score = replace(score, schema=_score_file("schema", score.schema), checker=_score_file("checker", score.checker))
    model = replace(pipeline.model, path=str(Path(pipeline.model.path)))
    data = replace(pipeline.data, path=str(Path(pipeline.data.path)))
    return replace(pipeline, model=model, data=data, evaluate=score)  # data/mine/ and ./data/mine are one folder


def _score_file(key: str, name: str | None) -> str | None:
    """The path of a checker or schema; raises ConfigError if it is not in conf/score, where its changes are seen."""
    path = paths.SCORE / (name or "").removeprefix(f"{paths.SCORE}/")
    if name and not (path.is_file() and path.resolve().is_relative_to(paths.SCORE.resolve())):
        do = f"put the file into {paths.SCORE}, where its changes are seen"
        raise ConfigError(f"evaluate.{key} is not a file in {paths.SCORE}.", where=path, got=name, do=do)
    return str(path) if name else None


def config_error(error: Exception) -> ConfigError:
    """Turn an error from Hydra or OmegaConf into one with the key's full name and its allowed values."""
    text = "\n".join(str(part) for part in (error, error.__cause__) if part)
    key_match = re.search(r"full_key: (\S+)", text)
    if key_match is None:
        return ConfigError(
            f"The configuration cannot be read: {text.split('Config search path:')[0].strip()}",
            where="params.yaml, conf/, command line",
        )
    full_key = "data.columns" if key_match[1].startswith("data.columns.") else key_match[1]  # one value
    section, _, key = full_key.rpartition(".")
    allowed = describe_allowed(section, key).replace(LIST, f"{LIST}, e.g. [a,b]")
    if "missing mandatory value" in text:
        return ConfigError(f"{full_key} has no value.", where="params.yaml", expected=allowed, do=f"add {full_key}")
    if allowed:
        value_match = re.search(r"Value '(?P<one>.*)' of type|Invalid (?:value|type) assigned: (?P<other>.*)", text)
        value = (value_match["one"] or value_match["other"] or "") if value_match else ""
        return ConfigError(f"{full_key} has the wrong type.", expected=allowed, got=value)
    return _unknown_key(section, key, COMMAND_LINE if "Could not override" in text else FILES)


def _unknown_key(section: str, key: str, where: str) -> ConfigError:
    prefix, names = f"{section}." if section else "", keys_of(section)
    near = [RENAMED[prefix + key]] if prefix + key in RENAMED else []
    near += [f"{each}.{key}" for each in names if not section and key in keys_of(each)]
    near += [prefix + name for name in difflib.get_close_matches(key, names, n=1)]
    what = f"Unknown key {prefix}{key}" + (f": did you mean {near[0]}?" if near else ".")
    expected = "" if near else f"one of {', '.join(prefix + name for name in names)}"
    return ConfigError(what, where=where, expected=expected, do="correct or remove it: this version has no such key")
