"""A stage's configuration: schema, params.yaml, overlay and command line, composed by Hydra, then checked."""

import difflib
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from safetrain.core.errors import ConfigError, SafetrainError, broken_yaml
from safetrain.core.records.schema import LIST, Pipeline, check_ranges, describe_allowed, keys_of
from safetrain.core.signals import exit_code_of, handling, terminate
from safetrain.core.storage.paths import shipped

FILES = "params.yaml or an overlay in conf/experiment"
ConfigStore.instance().store(name="schema", node=Pipeline)


def stage(function: Callable[[Pipeline], None]) -> Callable[[], None]:
    """Make ``function`` a command: its errors become messages with exit codes; other exceptions print a traceback."""

    @wraps(function)
    def command() -> None:
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing, so one place reports
        code = 0
        with handling({signal.SIGTERM: terminate}):
            try:
                _compose_and_call(function)
            except (SafetrainError, OSError, KeyboardInterrupt) as error:
                code = exit_code_of(error)
        sys.exit(code)

    return command


def _compose_and_call(function: Callable[[Pipeline], None]) -> None:
    if not Path("params.yaml").is_file():
        do = "go to the project's root, or make a project here: safetrain init"
        raise ConfigError("No params.yaml found.", where=str(Path.cwd()), do=do)
    conf = Path("conf") if Path("conf/config.yaml").is_file() else shipped("conf")
    configs: list[DictConfig] = []  # several with Hydra's --multirun; run outside Hydra, which reports errors twice
    compose = hydra.main(version_base="1.3", config_path=str(conf.resolve()), config_name="config")
    try:
        compose(configs.append)()
        pipelines = [to_pipeline(config) for config in configs]
    except YAMLError as error:
        raise broken_yaml(error) from None
    except (HydraException, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise config_error(error) from None
    for pipeline in pipelines:
        function(pipeline)


def to_pipeline(config: DictConfig) -> Pipeline:
    """Convert to the schema's dataclasses and check ranges; raises ConfigError."""
    pipeline = OmegaConf.to_object(config)
    if not isinstance(pipeline, Pipeline):
        raise ConfigError("The configuration does not follow the schema.", where="conf/config.yaml")
    check_ranges(pipeline)
    model = replace(pipeline.model, path=str(Path(pipeline.model.path)))
    data = replace(pipeline.data, path=str(Path(pipeline.data.path)))
    return replace(pipeline, model=model, data=data)  # data/mine/ and ./data/mine are one folder


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
    return _unknown_key(section, key, "the command line" if "Could not override" in text else FILES)


def _unknown_key(section: str, key: str, where: str) -> ConfigError:
    prefix, names = f"{section}." if section else "", keys_of(section)
    near = difflib.get_close_matches(key, names, n=1)
    return ConfigError(
        f"Unknown key {prefix}{key}" + (f": did you mean {prefix}{near[0]}?" if near else "."),
        where=where,
        expected="" if near else f"one of {', '.join(prefix + name for name in names)}",
        do="correct or remove it: this version has no such key",
    )
