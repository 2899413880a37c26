"""The shape of a new Llama model for a number of parameters, with embeddings, blocks and norms, by published rules."""

import bisect
import math
from dataclasses import dataclass, replace

from safetrain.core.errors import ConfigError

# Parameters, and a width near ln(width) = 5.039 + 0.0555 layers (Levine et al. 2020, arXiv:2006.12467)
PRESETS = {"10m": (10_000_000, 256), "85m": (85_000_000, 576), "400m": (400_000_000, 1024), "800m": (800_000_000, 1344)}
HEAD, SMALL_HEAD = 64, 32
GROUPED_FROM = 384  # features
MANY_FEATURES = 1024
SMALL_MODEL, SHORT_CONTEXT, USUAL_CONTEXT = 50_000_000, 1024, 2048
LEAST_VOCABULARY = 5 + 256  # special tokens and bytes
SMALL_VOCABULARY = 1024  # with fewer, a text has nearly as many tokens as bytes
VOCABULARY_STEP, FINE_STEP = 1024, 64
BYTES_PER_TOKEN, SEEN = 3.5, 20


@dataclass(frozen=True)
class ShapeRequest:
    """The size and width of a model; the rest is derived unless it is given. All are counts, ``context`` in tokens."""

    parameters: int
    hidden: int
    vocabulary: int | None = None
    context: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """The shape of a Llama model whose head is the embedding. Widths in features, ``context`` in tokens."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    feed_forward: int
    vocabulary: int
    context: int

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        query, key = self.hidden, self.key_heads * self.head
        block = self.hidden * (2 * query + 2 * key + 3 * self.feed_forward + 2)
        return self.vocabulary * self.hidden + self.layers * block + self.hidden


def preset(name: str, vocabulary: int | None = None, context: int | None = None) -> ShapeRequest:
    """The request for a preset; raises ConfigError for an unknown name."""
    if name not in PRESETS:
        raise ConfigError("No such preset.", expected=", ".join(PRESETS), got=name)
    return ShapeRequest(*PRESETS[name], vocabulary, context)


def shape_for(request: ShapeRequest, text_bytes: int | None = None) -> ModelShape:
    """The shape for a request; raises ConfigError if there is none.

    The best vocabulary also depends on the size of the text, ``text_bytes`` (None if unknown).
    """
    size, hidden = request.parameters, request.hidden
    heads, step = hidden // (HEAD if hidden >= 4 * HEAD else SMALL_HEAD), 64 if hidden < MANY_FEATURES else 128
    sizes = (3, 4, 2) if hidden >= GROUPED_FROM else ()  # of groups that share a key head (Ainslie et al. 2023)
    key_heads = heads // next((each for each in sizes if heads % each == 0), 1)
    vocabulary = request.vocabulary or vocabulary_for(size, hidden, text_bytes)
    context = request.context or (SHORT_CONTEXT if size < SMALL_MODEL else USUAL_CONTEXT)
    feed_forward = max(1, round(8 * hidden / 3 / step)) * step
    empty = ModelShape(hidden, 0, heads, key_heads, feed_forward, vocabulary, context)
    block = replace(empty, layers=1).parameters - empty.parameters
    layers = round((size - empty.parameters) / block)
    if layers < 1 or vocabulary < LEAST_VOCABULARY:
        raise ConfigError(
            f"A model of {size:,} parameters cannot have this vocabulary.",
            expected=f"{LEAST_VOCABULARY} tokens (256 bytes and 5 special ones) to {(size - block) // hidden:,}",
            got=f"{vocabulary:,} tokens",
        )
    return replace(empty, layers=layers)


def vocabulary_for(parameters: int, hidden: int, text_bytes: int | None = None) -> int:
    """Vocabulary size for a model and a text.

    By the model: embeddings grow as the 0.83rd power of the rest, 43,000 tokens of width 3,200 at 3 billion (Tao et
    al. 2024, arXiv:2407.13623). By the text: 95 % of the tokens should occur often (Gowda and May 2020,
    arXiv:2004.02334), where token number r of T occurs T / (r (ln V + 0.58)) times (Zipf): 20 times, not the 100 of
    their translations, as small texts are read in several epochs.
    """
    size_wanted = int(43_000 * 3_200 * (parameters / 3e9) ** 0.83 / hidden)
    if text_bytes is not None:
        rarest = text_bytes / BYTES_PER_TOKEN / SEEN / 0.95
        most = bisect.bisect_right(range(1, size_wanted), rarest, key=lambda size: size * (math.log(size) + 0.58))
        size_wanted = min(size_wanted, max(most, SMALL_VOCABULARY))
    step = VOCABULARY_STEP if size_wanted >= 2 * VOCABULARY_STEP else FINE_STEP
    return max(-(-LEAST_VOCABULARY // FINE_STEP) * FINE_STEP, size_wanted // step * step)


def rope_theta_for(context: int) -> float:
    """Base of the rotations: 10,000 (Su et al. 2021), more for long contexts.

    The least base for n tokens is 0.0424 n^1.628 (Men et al. 2024, arXiv:2405.14591), here to one digit.
    """
    least = 0.0424 * context**1.628
    digit = 10 ** math.floor(math.log10(least))
    return float(max(10_000, round(least / digit) * digit))
