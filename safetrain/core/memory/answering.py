"""How many tokens of prompts and answers may be held at once while answers are generated."""

from safetrain.core.memory.terms import FLOAT32
from safetrain.core.model.files import ModelFiles

CACHE_COPIES = 2  # of keys and values: a cache that grows is copied
LOGIT_ROWS = 2  # float32 numbers per logit alive while a token is chosen


def tokens_to_hold(model: ModelFiles, max_new_tokens: int, room_bytes: int) -> int:
    """Tokens whose keys, values and share of their row's logits fit in ``room_bytes``; at least 1."""
    cache = CACHE_COPIES * 2 * model.num_layers * model.num_kv_heads * model.head_dim * FLOAT32
    logits = LOGIT_ROWS * FLOAT32 * model.vocab_size / max_new_tokens
    return max(1, int(room_bytes / (cache + logits)))


def served_cache_bytes(weight_bytes: int, room_bytes: int) -> int:
    """For keys and values of a server's prompts and answers: half of what ``weight_bytes`` leave of ``room_bytes``.

    The other half is for a prompt that is read, and for buffers that mlx keeps.
    """
    return max(0, room_bytes - weight_bytes) // 2
