"""PEFT's adapter_config.json: what of it an adapter of this project can hold, and the rest refused by name. Pure."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetrain.core.errors import ModelError

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
SAME_NAMES = (  # families whose layers transformers and mlx-lm call the same: benchmarks/bench_export_peft.py
    "cohere", "ernie4_5", "gemma", "gemma2", "gemma3_text", "granite", "helium", "hunyuan_v1_dense",
    "llama", "ministral3", "mistral", "nemotron", "olmo2", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3",
    "starcoder2",
)  # fmt: skip
PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")  # of the two matrices, which leave the base as it is
IGNORED = frozenset({  # that decide nothing of what a finished adapter computes
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "modules_to_tie", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "target_modules_to_tie",
})  # fmt: skip
READ = frozenset({
    "alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern",
    "task_type", "use_dora", "use_rslora",
})  # fmt: skip
SET_NOWHERE: tuple[object, ...] = (None, False, "", [], {})


@dataclass(frozen=True)
class PeftShape:
    """The shape of an adapter as PEFT computes it. Patterns are regular expressions of the ends of layers' names."""

    rank: int
    alpha: float
    dora: bool = False
    by_root: bool = False  # rsLoRA: divided by the root of the rank, arXiv 2312.03732
    dropout: float = 0.0
    base_name: str = ""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, layer: str) -> int:
        """Rank of the pair on ``layer``."""
        return _by_pattern(self.rank_pattern, layer, self.rank)

    def scale_of(self, layer: str) -> float:
        """What the product of the pair on ``layer`` is multiplied with."""
        rank, alpha = self.rank_of(layer), _by_pattern(self.alpha_pattern, layer, self.alpha)
        return alpha / math.sqrt(rank) if self.by_root else alpha / rank


@dataclass(frozen=True)
class PeftTargets:
    """The layers that an adapter is on, in PEFT's names; ``blocks`` None: in all blocks."""

    names: tuple[str, ...]
    blocks: tuple[int, ...] | None


def require_same_names(base: Path) -> None:
    """Raise ModelError for a family whose layers may have other names in transformers, as those that see images have.

    ``base`` is a whole model folder.
    """
    family = json.loads((base / "config.json").read_text(encoding="utf-8")).get("model_type")
    if family not in SAME_NAMES:
        raise ModelError(
            f"Layers of {family} may have other names or another order in transformers than in mlx-lm.",
            where=str(base),
            expected=f"one of {', '.join(SAME_NAMES)}",
            do="safetrain fuse OUT makes one model of base and adapter, of any family",
        )


def read_peft_config(folder: Path) -> PeftShape:
    """The shape in a folder that PEFT wrote; raises ModelError, by name, for what has no counterpart here."""
    config = _configuration(folder)
    where = str(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise _refused(where, f"peft_type is {config.get('peft_type')!r}", "LORA, with or without DoRA")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _refused(
            where, f"task_type is {config['task_type']!r}, whose head is not a language model's", "CAUSAL_LM"
        )
    if config.get("bias", "none") != "none":
        raise _refused(where, f"bias is {config['bias']!r}: trained biases beside the pairs", "none")
    if config.get("fan_in_fan_out"):
        raise _refused(where, "fan_in_fan_out is true: weights stored the other way round", "false")
    start = config.get("init_lora_weights")
    if not isinstance(start, bool) and start is not None and start not in PLAIN_STARTS:
        raise _refused(where, f"init_lora_weights is {start!r}, which changes the base's own weights", "true or false")
    for key, value in config.items():
        if key not in IGNORED | READ and value not in SET_NOWHERE:
            raise _refused(where, f"{key} is {json.dumps(value)[:60]}", f"an adapter without {key}")
    try:
        return _shape(config)
    except (KeyError, TypeError, ValueError, re.error) as error:
        raise ModelError(f"PEFT's configuration cannot be read: {error!r}", where=where) from None


def config_of(shape: PeftShape, targets: PeftTargets) -> dict[str, Any]:
    """adapter_config.json as PEFT writes it."""
    alpha = int(shape.alpha) if shape.alpha.is_integer() else shape.alpha
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": shape.base_name, "revision": None,
        "inference_mode": True, "r": shape.rank, "lora_alpha": alpha, "lora_dropout": shape.dropout,
        "target_modules": list(targets.names),
        "layers_to_transform": None if targets.blocks is None else list(targets.blocks),
        "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none", "fan_in_fan_out": False,
        "init_lora_weights": True, "modules_to_save": None, "use_dora": shape.dora, "use_rslora": False,
    }  # fmt: skip


def targets_of(adapted: Mapping[str, int], linear: Mapping[str, int], depth: int) -> PeftTargets:
    """The shortest names that mean just the layers in ``adapted``, of all in ``linear``; both by path: the block."""
    blocks = sorted(set(adapted.values()))
    for start in (r".*\.", r".*?\.\d+\."):  # q_proj, then self_attn.q_proj, of model.layers.3.self_attn.q_proj
        short = {path: re.sub(f"^{start}", "", path) for path in linear}
        names = {short[path] for path in adapted}
        if {path for path, block in linear.items() if block in blocks and short[path] in names} == set(adapted):
            return PeftTargets(tuple(sorted(names)), None if len(blocks) == depth else tuple(blocks))
    return PeftTargets(tuple(sorted(adapted)), None)


def _configuration(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a folder that is whole, as far as its files go."""
    if not folder.is_dir():
        raise ModelError("The folder does not exist.", where=str(folder), do="name the folder that PEFT wrote")
    names = [each.parent.name for each in sorted(folder.glob(f"*/{CONFIG}"))]
    path = folder / CONFIG
    if not path.is_file():
        do = f"name the folder of one adapter: {', '.join(names)}" if names else "name the folder that PEFT wrote"
        raise ModelError(f"No PEFT adapter found: {CONFIG} is missing.", where=str(folder), do=do)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"PEFT's configuration cannot be read: {error}", where=str(path)) from None
    if not isinstance(config, dict):
        raise ModelError("PEFT's configuration is not a JSON object.", where=str(path))
    if "fine_tune_type" in config:
        raise ModelError(
            "This is an adapter for MLX already.", where=str(folder), do=f"safetrain ask --adapter {folder} …"
        )
    if not (folder / WEIGHTS).is_file():
        raise _no_weights(folder)
    return config


def _no_weights(folder: Path) -> ModelError:
    if (folder / PICKLE).is_file():
        return ModelError(
            f"The weights are a pickle ({PICKLE}), which may run any code when it is opened.",
            where=str(folder),
            expected=WEIGHTS,
            do="save the adapter again in PEFT: save_pretrained(folder, safe_serialization=True)",
        )
    return ModelError(
        f"The adapter is half written: {WEIGHTS} is missing.", where=str(folder), do="copy the whole folder again"
    )


def _shape(config: Mapping[str, Any]) -> PeftShape:
    shape = PeftShape(
        rank=_number(config, "r", whole=True),
        alpha=_number(config, "lora_alpha"),
        dora=bool(config.get("use_dora")),
        by_root=bool(config.get("use_rslora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        base_name=str(config.get("base_model_name_or_path") or ""),
        rank_pattern={key: int(value) for key, value in (config.get("rank_pattern") or {}).items()},
        alpha_pattern={key: float(value) for key, value in (config.get("alpha_pattern") or {}).items()},
    )
    shape.scale_of("")  # finds a pattern that is not a regular expression
    return shape


def _number(config: Mapping[str, Any], key: str, *, whole: bool = False) -> Any:
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value > 0:
        raise ValueError(f"{key} is {value!r}, no {'whole ' if whole else ''}number above 0")
    return value if whole else float(value)


def _by_pattern(patterns: Mapping[str, Any], layer: str, usual: Any) -> Any:
    """The value of the first pattern that matches the layer, in PEFT's order."""
    values = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer))
    return next(values, usual)


def _refused(where: str, what: str, expected: str) -> ModelError:
    return ModelError(
        f"This adapter has no counterpart: {what}.",
        where=where,
        expected=expected,
        do="merge it into its base in PEFT (merge_and_unload), and use that model",
    )
