"""A small model of every architecture that mlx-lm has, with random weights. No download, no meaning.

The sizes are ours, by the names of the arguments; what a family wants beside them stands in ``OWN``.
"""

import dataclasses
import importlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.random_models import EMBEDDED

WIDTH, BLOCKS, HEADS, KEY_HEADS, HEAD, INNER, WORDS, EXPERTS = 64, 4, 4, 2, 16, 96, 320, 4
NAMED: list[tuple[object, str]] = [  # a value, and the arguments that have it
    (WIDTH, "hidden_size n_embd d_model dim model_dim hidden_dim embed_dim block_dim"),
    (BLOCKS, "num_hidden_layers n_layer n_layers num_layers num_transformer_layers"),
    (HEADS, "num_attention_heads n_head n_heads num_heads mamba_num_heads mamba_n_heads"),
    (KEY_HEADS, "num_key_value_heads n_kv_heads num_kv_heads num_attention_groups"),
    (HEAD, "head_dim hidden_size_per_head mamba_d_head mamba_head_dim kv_channels"),
    (INNER, "intermediate_size ffn_hidden_size mlp_hidden_size ff_intermediate_size n_inner"),
    (INNER, "intermediate_size_mlp dense_intermediate_size shared_intermediate_size"),
    (32, "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size"),
    (32, "moe_shared_expert_intermediate_size share_expert_dim block_ff_dim moe_hidden_size"),
    (WORDS, "vocab_size num_vocab embedding_size vocab_size_per_layer_input"),
    (256, "max_position_embeddings n_positions n_ctx model_max_length block_size"),
    (256, "original_max_position_embeddings"),
    (EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k"),
    (2, "top_k_experts"),
    (1, "n_shared_experts num_shared_experts num_shared_expert first_k_dense_replace"),
    (1, "n_group topk_group moe_layer_freq decoder_sparse_step num_dense_layers"),
    (1e-5, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps layernorm_epsilon"),
    (1e-5, "norm_epsilon post_norm_eps mixer_rms_eps"),
    (1e4, "rope_theta rope_local_base_freq swa_rope_theta rotary_emb_base"),
    (16, "kv_lora_rank q_lora_rank v_head_dim qk_nope_head_dim state_size ssm_state_size"),
    (8, "qk_rope_head_dim rotary_dim mamba_d_state laurel_rank time_step_rank"),
    (8, "a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim"),
    (2, "linear_num_value_heads linear_num_key_heads n_groups mamba_n_groups"),
    (HEAD, "linear_key_head_dim linear_value_head_dim index_head_dim"),
    (3, "mamba_d_conv conv_kernel linear_conv_kernel_dim conv1d_width conv_L_cache"),
    (2, "short_conv_kernel_size conv_window"),
    (24, "sliding_window attention_window_size window_size sliding_window_size"),
    (24, "attention_chunk_size loop_window_size index_topk"),
    (1.5, "scale_depth scale_emb routed_scaling_factor logits_scaling embedding_multiplier"),
    (0.5, "attention_multiplier residual_multiplier rotary_pct partial_rotary_factor"),
]
SIZES: dict[str, Any] = {
    **{name: value for value, names in NAMED for name in names.split()},
    "dim_model_base": 32, "index_n_heads": 2, "mamba_expand": 2, "mamba_d_ssm": HEADS * HEAD, "layer_group_size": 2,
    "group_norm_size": 2, "hidden_size_per_layer_input": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
    "query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2, "pad_token_id": 0,
    "image_token_id": 0, "gegelu_limit": 20.0, "num_kv_shared_layers": 2, "num_kv_reuse_layers": 2,
    "moe_layer_interval": 2, "full_attention_interval": 2, "zero_expert_num": 1, "o_groups": 2, "o_lora_rank": 16,
}  # fmt: skip
HALF = ["sliding_attention", "full_attention"] * (BLOCKS // 2)
DELTA: dict[str, Any] = {
    "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": HEADS, "head_dim": HEAD, "short_conv_kernel_size": 3,
}  # fmt: skip
NAS = {
    "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
    "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False},
}
YARN = {
    "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
GROWING = {
    "rope_theta": 1e4, "rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 256,
}  # fmt: skip
ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in sorted(set(HALF))}
LONGCAT = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True}
OWN: dict[str, dict[str, Any]] = {  # null leaves the argument to mlx-lm
    "afmoe": {"layer_types": HALF},
    "afm7": {"num_kv_reuse_layers": 2},
    "baichuan_m1": {"sliding_window_layers": [0, 2]},
    "bailing_moe_linear": {"num_key_value_heads": HEADS},
    "bailing_hybrid": {"num_key_value_heads": HEADS},
    "bitnet": {},
    "cohere2": {"sliding_window_pattern": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": EXPERTS, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": KEY_HEADS, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v2": {"rope_scaling": YARN},
    "deepseek_v41": {
        "compress_ratios": [0, 4, 4, 4], "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3],
        "n_group": None, "hc_sinkhorn_iters": 3, "sliding_window": 16,
    },
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": {"layer_types": HALF, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": HALF, "attn_logit_softcapping": None},
    "gemma3n": {
        "layer_types": HALF, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "altup_num_inputs": 2,
        "altup_coef_clip": 1.0, "altup_correct_scale": True, "altup_active_idx": 0,
    },
    "gemma4": {"layer_types": HALF},
    "gemma4_text": {"layer_types": HALF},
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 1e4}, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "gpt_oss": {"layer_types": HALF},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 2.0}, "use_cla": True, "cla_share_factor": 2,
        "use_mixed_mlp_moe": True, "num_shared_expert": 1,
    },
    "internlm3": {},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k3": {
        "linear_attn_config": DELTA, "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0,
        "attn_res_block_size": 2, "routed_expert_hidden_size": 32,
    },
    "kimi_linear": {"linear_attn_config": DELTA},
    "laguna": {"layer_types": HALF, "rope_parameters": ROPES},
    "lfm2": {"layer_types": ["full_attention", "conv"] * 2, "block_multiple_of": 4, "block_ffn_dim_multiplier": 1.0},
    "lfm2-vl": {"layer_types": ["full_attention", "conv"] * 2, "block_multiple_of": 4, "block_ffn_dim_multiplier": 1.0},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 2},
    "llama4": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "rope_scaling": None},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {**LONGCAT, "attention_method": "MLA", "zero_expert_type": "identity"},
    "longcat_flash_ngram": {**LONGCAT, "ngram_vocab_size_ratio": 2},
    "mamba": {"intermediate_size": 2 * WIDTH},
    "mamba2": {"time_step_limit": [0.001, 100.0], "intermediate_size": WIDTH, "hidden_size": WIDTH, "num_heads": HEADS},
    "mellum": {"layer_types": HALF, "rope_parameters": ROPES},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1], "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": KEY_HEADS,
        "swa_head_dim": HEAD, "swa_v_head_dim": HEAD, "add_swa_attention_sink_bias": True,
    },
    "minicpm3": {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4,
                                  "original_max_position_embeddings": 256}},
    "minimax": {"rotary_dim": 8},
    "minimax_m3_vl": {"index_n_heads": None, "index_head_dim": None, "moe_layer_freq": None},
    "ministral3": {"layer_types": HALF, "rope_parameters": GROWING},
    "mistral4": {"rope_parameters": GROWING},
    "muse_spark": {
        "layer_types": HALF, "rope_parameters": {"rope_theta": 1e4}, "layer_rope_theta": [1e4, 0, 1e4, 0],
        "output_multiplier": 0.5, "num_shared_experts": 0, "moe_hidden_size": 32,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": [NAS] * BLOCKS},
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-", "E"], "n_groups": 2, "time_step_limit": None},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "openelm": {
        "num_query_heads": [4] * BLOCKS, "num_kv_heads": [2] * BLOCKS, "ffn_multipliers": [1.0, 1.5, 1.5, 2.0],
        "ffn_dim_divisor": 16,
    },
    "phi3small": {"dense_attention_every_n_layers": 2, "vocab_size": 100352},
    "phixtral": {"rotary_dim": 8},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"attention_window_size": 32},
    "qwen": {"intermediate_size": 2 * INNER},
    "qwen3_next": {"mlp_only_layers": [0]},
    "qwen3_vl_moe": {"tie_word_embeddings": False},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "_block_types": None, "logits_soft_cap": 30.0},
    "smollm3": {"no_rope_layers": None},
    "spark2_5": {"layer_types": HALF, "rope_parameters": ROPES},
    "stablelm": {"partial_rotary_factor": 0.5},
    "step3p5": {"layer_types": HALF, "moe_layers_enum": "1,2,3", "rope_scaling": None},
    "youtu_llm": {},
}  # fmt: skip
TEXT: dict[str, tuple[str, str]] = {  # whose arguments the text part of config.json has
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma3n": ("gemma3n", "TextConfig"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "kimi_k3": ("kimi_k3", "TextArgs"),
    "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "mistral3": ("ministral3", "ModelArgs"),
    "muse_spark": ("muse_spark", "TextArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}
ROUNDED = ("quant_key_scale", "quant_value_scale")  # steps to which AFM rounds its keys and values
FORMATS = ("prism_hadamard_qwen35",)  # of quantized weights, whose files say how they were quantized
DENSE = ("qwen3_5",)  # where the number of experts is none by itself


def families() -> list[str]:
    """Every architecture that mlx-lm has, by the name of its file."""
    folder = Path(importlib.util.find_spec("mlx_lm").submodule_search_locations[0]) / "models"  # type: ignore
    sources = {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.py")}
    found = sorted(name for name, text in sources.items() if "class ModelArgs" in text and "class Model(" in text)
    return [name for name in found if name not in FORMATS]


def config_of(family: str) -> dict[str, Any]:
    """A small config.json of the family."""
    if family not in TEXT:
        return {"model_type": family, **_arguments(family, "ModelArgs", {**OWN.get(family, {})})}
    inner, name = TEXT[family]
    own = {**OWN.get(inner, {}), **OWN.get(family, {})}
    text = {"model_type": inner, **_arguments(inner, name, own)}
    if family in DENSE:
        text = {key: value for key, value in text.items() if "expert" not in key}
    return {"model_type": family, "vocab_size": WORDS, "text_config": text}


def _arguments(module: str, name: str, own: dict[str, Any]) -> dict[str, Any]:
    """Sizes for every argument that has one, false for what may be true, what is the family's own."""
    kind = getattr(importlib.import_module(f"mlx_lm.models.{module}"), name)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name in own:
            found[field.name] = own[field.name]
        elif field.name in SIZES:
            found[field.name] = SIZES[field.name]
        elif needed and field.type in (bool, "bool"):
            found[field.name] = field.name in ("norm_topk_prob", "tie_word_embeddings", "use_qk_norm", "use_conv_bias")
        elif needed and field.name == "mlp_only_layers":
            found[field.name] = []
    left = [key for key, value in own.items() if value is None and key in found]
    return {key: value for key, value in found.items() if key not in left or key in ("rope_scaling",)}


def build_family(folder: Path, family: str, **changes: Any) -> Path:
    """Write a small model of the family, with the embedded one's tokenizer; what starts as zero is small numbers."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map, tree_unflatten
    from mlx_lm.utils import _get_classes

    config = {**config_of(family), **changes}
    folder.mkdir(parents=True)
    mx.random.seed(3)
    architecture, arguments = _get_classes(config)
    model = architecture(arguments.from_dict(config))
    model.update(tree_map(_stirred, model.parameters()))
    for name, value in tree_flatten(model.parameters()):
        if name.endswith(ROUNDED):
            model.update(tree_unflatten([(name, 0.02 * mx.ones_like(value))]))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, folder / file)
    return folder


def _stirred(weight: Any) -> Any:
    """Random numbers on top: a router of zeros would choose by chance, and a layer of zeros has no gradient."""
    import mlx.core as mx

    floating = mx.issubdtype(weight.dtype, mx.floating)
    return weight + (0.02 * mx.random.normal(weight.shape)).astype(weight.dtype) if floating else weight
