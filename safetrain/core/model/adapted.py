"""Which weights of a model belong to which block, and which of them an adapter can be put on, by their names.

A weight of two dimensions is a linear layer, of three the experts of a mixture, unless its name says otherwise: the
engine looks at the layers themselves, and the two agree (measured: benchmarks/bench_families).
"""

import re
from collections.abc import Iterator

from safetrain.core.model.files import ModelFiles
from safetrain.core.model.shapes import TensorHeader

IN_BLOCK = re.compile(r"(?:^|\.)(layers|h|blocks|kv_reuse_layers)\.(\d+)\.(.+)$")
ON_TOP = "kv_reuse_layers"  # the last blocks, counted from 0 again (AFM)
OTHER_PART = re.compile(
    r"^(?:model\.)?(?:vision|visual|audio|multi_modal|mm_projector|mtp\.)"
)  # mlx-lm leaves them out
# Convolutions; the halves into which multi-head latent attention takes its projection apart; a norm for each head;
# what the model reads by itself (Gemma 3n, Kimi K3).
NO_LINEAR = re.compile(
    r"(?:^|[._])(?:conv|conv1d|conv_1d|embed_q|unembed_out|g_norm|prediction_coefs|correction_coefs|attention_res_proj|"
    r"mlp_res_proj)$"
)
ROUTER = "gate"  # a parameter, not a layer, in these families
ROUTER_IS_A_PARAMETER = (
    "bailing_hybrid", "bailing_moe_v3", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41",
    "deepseek_v41_text", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "joyai_llm_flash",
    "kimi_k2", "kimi_vl", "mimo_v2_flash", "muse_spark", "nemotron_h",
)  # fmt: skip
ADAPTED_OTHERWISE = {"afm7": ("self_attn.qkv_proj",), "bitnet": ("proj",)}  # or not at all, by the ends of their names


def in_blocks(model: ModelFiles) -> Iterator[tuple[int, str, TensorHeader]]:
    """The block, the name inside it and the header of every tensor of a block."""
    matches = [
        (match, tensor)
        for tensor in model.tensors
        if (match := IN_BLOCK.search(tensor.name)) and not OTHER_PART.match(tensor.name)
    ]
    on_top = max((int(match[2]) + 1 for match, _ in matches if match[1] == ON_TOP), default=0)
    for match, tensor in matches:
        below = model.num_layers - on_top if match[1] == ON_TOP else 0
        yield below + int(match[2]), match[3], tensor


def adapted_weights(model: ModelFiles) -> Iterator[tuple[int, str, TensorHeader]]:
    """The block, the layer's name inside it and the weight of every layer that an adapter can be put on."""
    otherwise = ADAPTED_OTHERWISE.get(model.model_type, ())
    has_parameter = model.model_type in ROUTER_IS_A_PARAMETER
    for block, name, tensor in in_blocks(model):
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or len(tensor.shape) < 2 or NO_LINEAR.search(layer) or layer.endswith(otherwise):
            continue
        if not (has_parameter and layer.rpartition(".")[2] == ROUTER):
            yield block, layer, tensor
