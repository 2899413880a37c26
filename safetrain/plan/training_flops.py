"""How many floating-point operations a training takes, counted from a model's headers."""

from safetrain.core.model.files import ModelFiles

FORWARD, BACKWARD, WEIGHT_GRADIENT = 2, 2, 2  # operations for each weight that a token is multiplied with
ATTENTION_PASSES = 3  # scores and their result, forward once and backward twice
EMBEDDING = "embed_tokens"
HEAD = "lm_head"


def multiplied_weights(model: ModelFiles) -> int:
    """Weights that every token is multiplied with: all matrices, but not the embedding, unless it is the head too."""
    matrices = [tensor for tensor in model.tensors if tensor.weights and len(tensor.shape) >= 2]
    has_head = any(HEAD in tensor.name for tensor in matrices)
    return sum(tensor.weights for tensor in matrices if not (has_head and EMBEDDING in tensor.name))


def flops_per_token(model: ModelFiles, length: int, trained: int, *, recompute: bool = False) -> float:
    """Operations for a token of rows of ``length`` tokens, ``trained`` of the weights being trained.

    6 for each weight that is trained, 4 for a frozen one below an adapter (Kaplan et al. 2020, arXiv:2001.08361), and
    attention, half of the 12 x layers x width x length of PaLM (arXiv:2204.02311, appendix B), because a token sees
    only those before it. Adapters have weights of their own, beside the base's.
    """
    weights = multiplied_weights(model)
    attention = FORWARD * ATTENTION_PASSES * model.num_layers * model.num_heads * model.head_dim * length
    again = FORWARD * weights + attention / ATTENTION_PASSES if recompute else 0
    own_gradient = WEIGHT_GRADIENT * trained
    return (FORWARD + BACKWARD) * weights + own_gradient + attention + again
