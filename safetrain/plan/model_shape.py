"""The shape of a new Llama model for a number of parameters, by published rules.

The number of parameters includes embeddings, blocks and norms; a matrix that is both embedding and head counts once.
"""

import bisect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from safetrain.core.errors import ConfigError

PRESETS = {"10m": 10_000_000, "85m": 85_000_000, "400m": 400_000_000, "800m": 800_000_000}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmb]?)", re.IGNORECASE)
UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}
WIDTH_STEP = 64  # divisible into quantization groups of 32 and 64; 128 from MANY_FEATURES on
MANY_FEATURES = 1024
WIDEST = 16_384
HEAD, SMALL_HEAD = 64, 32
GROUPED_FROM = 384  # features
UNTIED_FROM = 1_000_000_000  # parameters
SHORT_CONTEXT, USUAL_CONTEXT = 1024, 2048
SMALL_MODEL = 50_000_000
SIZE_MISS = 0.02  # a size within this share counts as reached
LEAST_VOCABULARY = 5 + 256  # special tokens and bytes
SMALL_VOCABULARY = 1024  # with fewer, a text has nearly as many tokens as bytes
VOCABULARY_STEP, FINE_STEP = 1024, 64
BYTES_PER_TOKEN, SEEN = 3.5, 20


@dataclass(frozen=True)
class ShapeRequest:
    """The size, or width and layers; the rest is derived unless it is given. All are counts, ``context`` in tokens."""

    parameters: int | None = None
    hidden: int | None = None
    layers: int | None = None
    vocabulary: int | None = None
    context: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """The shape of a Llama model. Widths in features, ``context`` in tokens."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head: int
    feed_forward: int
    vocabulary: int
    context: int
    rope_theta: float
    tied: bool

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, plus the head if it is a separate matrix."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def block(self) -> int:
        """Parameters of one block."""
        query, key = self.heads * self.head, self.key_heads * self.head
        return self.hidden * (2 * query + 2 * key + 3 * self.feed_forward + 2)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.embedding + self.layers * self.block + self.hidden


def parameters_named(text: str) -> int | None:
    """Parse a size such as ``10m``, ``1.2b`` or ``120000``; None for anything else."""
    match = SIZE.fullmatch(text.strip())
    return round(float(match[1]) * UNITS[match[2].lower()]) if match else None


def shape_for(request: ShapeRequest, text_bytes: int | None = None) -> ModelShape:
    """The shape nearest to the ``request``; raises ConfigError if there is none.

    The best vocabulary also depends on the size of the text, ``text_bytes`` (None if unknown).
    """
    if request.vocabulary is not None and request.vocabulary < LEAST_VOCABULARY:
        expected = f"at least {LEAST_VOCABULARY}: 256 bytes and 5 special tokens"
        raise ConfigError("The vocabulary is too small.", expected=expected, got=str(request.vocabulary))
    shapes = [shape for hidden in _widths(request) if (shape := _of_width(request, hidden, text_bytes)) is not None]
    best = min(shapes, key=lambda shape: _distance(shape, request.parameters), default=None)
    if best is None:
        got = f"{request.parameters:,} parameters, vocabulary {request.vocabulary}"
        do = "ask for more parameters, or a smaller vocabulary"
        raise ConfigError("No shape fits this size.", got=got, do=do)
    return best


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


def _widths(request: ShapeRequest) -> Iterator[int]:
    """Yield candidate widths; wide ones only if their heads can share keys and values."""
    if request.hidden is not None:
        yield request.hidden
    else:
        widths = range(WIDTH_STEP, WIDEST + 1, WIDTH_STEP)
        yield from (width for width in widths if width < GROUPED_FROM or _group(width // HEAD) > 1)


def _of_width(request: ShapeRequest, hidden: int, text_bytes: int | None) -> ModelShape | None:
    """The shape of this width; None if no parameters remain for a layer."""
    heads = hidden // (HEAD if hidden >= 4 * HEAD else SMALL_HEAD)
    step = WIDTH_STEP if hidden < MANY_FEATURES else 2 * WIDTH_STEP
    key_heads = heads // (_group(heads) if hidden >= GROUPED_FROM else 1)
    feed_forward = max(1, round(8 * hidden / 3 / step)) * step
    block = hidden * (2 * hidden + 2 * key_heads * (hidden // heads) + 3 * feed_forward + 2)
    size = request.parameters or block * (request.layers or 1)
    vocabulary = request.vocabulary or vocabulary_for(size, hidden, text_bytes)
    tied = size < UNTIED_FROM
    context = request.context or (SHORT_CONTEXT if size < SMALL_MODEL else USUAL_CONTEXT)
    remaining = (request.parameters or 0) - vocabulary * hidden * (1 if tied else 2) - hidden
    layers = request.layers or round(remaining / block)
    if layers < 1:
        return None
    return ModelShape(
        hidden=hidden, layers=layers, heads=heads, key_heads=key_heads, head=hidden // heads,
        feed_forward=feed_forward, vocabulary=vocabulary, context=context,
        rope_theta=rope_theta_for(context), tied=tied,
    )  # fmt: skip


def _group(heads: int) -> int:
    """Query heads per key head (Ainslie et al. 2023, arXiv:2305.13245); 1 if they cannot share."""
    return next((size for size in (3, 4, 2) if heads % size == 0 and size < heads), 1)


def _distance(shape: ModelShape, parameters: int | None) -> float:
    """The distance of a shape from the requested size, and from the best of depth and width.

    That is where ln(width) = 5.039 + 0.0555 layers (Levine et al. 2020, arXiv:2006.12467).
    """
    depth = abs(math.log(shape.hidden) - (5.039 + 0.0555 * shape.layers))
    miss = abs(math.log(shape.parameters / parameters)) if parameters else 0.0
    return depth + miss + 20 * max(0.0, miss - SIZE_MISS)
