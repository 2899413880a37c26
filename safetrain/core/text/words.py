"""Divides blocks of texts into words and hashes them.

Texts that differ only in case, white space, punctuation or apostrophes have the same words. Arithmetic signs are words
(3 + 4 is not 3 * 4), and so is each letter of a script without spaces between words.
"""

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GAP, PART, ALONE, DROPPED, STAR, MINUS = range(6)  # kinds of characters
KINDS = {"Pc": PART, "Sm": ALONE, "Sc": ALONE, "So": ALONE, "Cf": DROPPED}  # by Unicode category; L, M, N: PART
UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF))
APOSTROPHES = "'\u2019\u02bc\u00ad"
BORDER = "\n"  # after each text: a gap that is neither a space nor a digit
LAST = 0xFFFF  # replaces every character beyond it: emoji, rare ideographs
RUN_WORDS = 5
RUN_BASE = np.uint64(0x165667B19E3779F9)
LETTER_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Words:
    """The words of several texts: ``hashes`` of all words in order, (words,); ``bounds`` divide them by text."""

    hashes: np.ndarray
    bounds: np.ndarray  # (texts + 1,)

    @property
    def counts(self) -> np.ndarray:
        """The number of words of each text; (texts,)."""
        return np.diff(self.bounds)


def words_of(texts: Sequence[str]) -> Words:
    parts = [folded(text) + BORDER for text in texts]
    codes = np.frombuffer("".join(parts).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    ends = np.cumsum([0, *map(len, parts)])
    kinds = _kinds()[np.minimum(codes, LAST)]
    kept = kinds != DROPPED
    ends = np.concatenate([[0], np.cumsum(kept)])[ends]
    codes, kinds = codes[kept], kinds[kept]
    _decide_signs(codes, kinds)
    begins = (kinds != GAP) & ((kinds == ALONE) | (np.concatenate([[GAP], kinds[:-1]]) != PART))
    letters = np.flatnonzero(kinds != GAP)
    hashes = hashed(codes[letters] + np.uint64(1), np.flatnonzero(begins[letters]), LETTER_BASE)
    return Words(hashes, np.searchsorted(np.flatnonzero(begins), ends))


def runs_of(words: Words) -> tuple[np.ndarray, np.ndarray]:
    """Each text's runs of five words in order, as 32-bit hashes, and their bounds (texts + 1,); a short text is one."""
    counts = words.counts
    sizes = np.where(counts > 0, np.maximum(counts - RUN_WORDS + 1, 1), 0)
    bounds = np.cumsum([0, *sizes])
    first = np.arange(bounds[-1]) + np.repeat(words.bounds[:-1] - bounds[:-1], sizes)
    last = np.repeat(words.bounds[1:], sizes)
    places = first[:, None] + np.arange(RUN_WORDS)
    padded = np.concatenate([words.hashes, np.zeros(RUN_WORDS, dtype=np.uint64)])
    powers = RUN_BASE ** np.arange(RUN_WORDS, dtype=np.uint64)
    sums = np.where(places < last[:, None], padded[places], np.uint64(0)) @ powers
    return (mixed(sums) >> np.uint64(32)).astype(np.uint32), bounds


def folded(text: str) -> str:
    """Normalise case and composed letters."""
    return (text if text.isascii() else unicodedata.normalize("NFC", text)).casefold()


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Make every bit of the result depend on every bit of the number (splitmix64)."""
    bits = numbers ^ (numbers >> np.uint64(30))
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def hashed(values: np.ndarray, firsts: np.ndarray, base: np.uint64) -> np.ndarray:
    """Hash each group of consecutive values (uint64); (groups,). ``firsts``: index of each group's first value."""
    if not len(firsts):
        return np.zeros(0, dtype=np.uint64)
    sizes = np.diff(firsts, append=len(values))
    places = np.arange(len(values)) - np.repeat(firsts, sizes)
    powers = base ** np.arange(sizes.max(), dtype=np.uint64)  # modulo 2 to the 64
    return mixed(np.add.reduceat(values * powers[places], firsts))


def _decide_signs(codes: np.ndarray, kinds: np.ndarray) -> None:
    """Make a minus a word before a digit, and a star also between two words; elsewhere both are punctuation."""
    signs = np.flatnonzero(kinds >= STAR)
    around = np.pad(codes, (1, 2))
    before, after = around[signs], around[signs + 2]
    is_digit = (around >= ord("0")) & (around <= ord("9"))
    digit = is_digit[signs + 2] | ((after == ord(" ")) & is_digit[signs + 3])
    spaced = (before == ord(" ")) & (after == ord(" "))
    joined = (_kinds()[np.minimum(before, LAST)] == PART) & (_kinds()[np.minimum(after, LAST)] == PART)
    kinds[signs] = np.where(digit | ((kinds[signs] == STAR) & (spaced | joined)), ALONE, GAP)


@functools.cache
def _kinds() -> np.ndarray:
    """The kind of each character; (65,536,)."""
    categories = map(unicodedata.category, map(chr, range(LAST + 1)))
    kinds = np.array([PART if each[0] in "LMN" else KINDS.get(each, GAP) for each in categories], dtype=np.uint8)
    for first, last in UNSPACED:
        among = kinds[first : last + 1]
        among[among == PART] = ALONE
    kinds[[ord(letter) for letter in APOSTROPHES]] = DROPPED
    kinds[[*map(ord, "^%/\\"), LAST]] = ALONE
    kinds[ord("*")], kinds[ord("-")] = STAR, MINUS
    return kinds
