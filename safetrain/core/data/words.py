"""Texts as numbers: a hash of each word, of each five words in a row, and of all words, for whole blocks of texts.

Two texts that differ in case, white space, punctuation or apostrophes alone have the same words. Signs of arithmetic
are words (3 + 4 is not 3 * 4); so is each letter of a script that puts no spaces between words. That is what serves to
find what resembles; whether two texts say the same is asked of ``strict_digest``.
"""

import functools
import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SHINGLE_WORDS = 5
GAP, PART, ALONE, DROPPED, STAR, MINUS = range(6)  # what a character is to a word
UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF))
APOSTROPHES = "'\u2019\u02bc\u00ad"
BORDER = "\n"  # behind each text: a gap, and neither space nor digit to a sign beside it
SENTENCE_MARKS = re.compile(r"[.,;:!?…。，、；：？！।؟¿¡]+")  # a whole run of them: what follows is looked at apart
QUOTES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
LAST = 0xFFFF  # stands for every character beyond it: emoji, rare ideographs
LETTER_BASE, WORD_BASE, SHINGLE_BASE = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
)


@dataclass(frozen=True)
class Words:
    """The words of some texts, one after the other: ``hashes`` (words,), and where each text's begin and end."""

    hashes: np.ndarray
    bounds: np.ndarray  # (texts + 1,)

    @property
    def counts(self) -> np.ndarray:
        """(texts,) words of each."""
        return np.diff(self.bounds)


def words_of(texts: Sequence[str]) -> Words:
    """The words of ``texts``."""
    folded = [_folded(text) + BORDER for text in texts]
    codes = np.frombuffer("".join(folded).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    ends = np.cumsum([0, *map(len, folded)])
    kinds = _kinds()[np.minimum(codes, LAST)]
    dropped = np.flatnonzero(kinds == DROPPED)
    if len(dropped):
        ends = ends - np.searchsorted(dropped, ends)
        codes, kinds = np.delete(codes, dropped), np.delete(kinds, dropped)
    kinds = _with_signs(codes, kinds)
    starts = np.ones(len(codes) + 1, dtype=np.bool_)
    starts[1:-1] = (kinds[1:] == ALONE) | (kinds[:-1] != PART)
    starts[ends] = True
    begin = np.flatnonzero(starts[:-1] & (kinds != GAP))
    stop = np.flatnonzero(starts[1:] | np.append(kinds[1:] == GAP, True)) if len(codes) else begin
    stop = stop[kinds[stop] != GAP] + 1
    return Words(_hashes(codes, begin, stop - begin), np.searchsorted(begin, ends))


def _folded(text: str) -> str:
    return (text if text.isascii() else unicodedata.normalize("NFC", text)).casefold()


def digests(words: Words) -> np.ndarray:
    """(texts,) one number for all words of each text, in order; 0 where there are none."""
    found = np.zeros(len(words.bounds) - 1, dtype=np.uint64)
    some = words.counts > 0
    starts = words.bounds[:-1][some]
    if len(starts):
        places = np.arange(len(words.hashes)) - np.repeat(starts, words.counts[some])
        powers = _powers(WORD_BASE, int(words.counts.max()))
        found[some] = mixed(np.add.reduceat(words.hashes * powers[places], starts)) | np.uint64(1)
    return found


def shingles(words: Words) -> tuple[np.ndarray, np.ndarray]:
    """The different runs of five words of each text, as sorted numbers of 32 bits, and (texts + 1,) where they begin.

    A text of fewer words is one run.
    """
    counts, starts = words.counts, words.bounds[:-1]
    runs = np.where(counts > 0, np.maximum(counts - SHINGLE_WORDS + 1, 1), 0)
    of_text = np.repeat(np.arange(len(counts)), runs)
    first = np.arange(int(runs.sum())) - np.repeat(np.cumsum(runs) - runs, runs) + np.repeat(starts, runs)
    last = np.repeat(words.bounds[1:], runs)
    sums = np.zeros(len(first), dtype=np.uint64)
    padded = np.concatenate([words.hashes, np.zeros(SHINGLE_WORDS, dtype=np.uint64)])
    for place, power in enumerate(_powers(SHINGLE_BASE, SHINGLE_WORDS)):
        sums += np.where(first + place < last, padded[first + place] * power, np.uint64(0))
    numbered = (of_text.astype(np.uint64) << np.uint64(32)) | (mixed(sums) >> np.uint64(32))
    numbered.sort()
    if len(numbered):
        numbered = numbered[np.concatenate([[True], numbered[1:] != numbered[:-1]])]
    bounds = np.searchsorted(numbered, np.arange(len(counts) + 1, dtype=np.uint64) << np.uint64(32))
    return numbered.astype(np.uint32), bounds


def plain_digest(text: str) -> int:
    """For a text without words: equal for equal ones. Even, as no digest of words is."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") & ~1


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Every bit of the result depends on every bit of the number (splitmix64)."""
    found = numbers ^ (numbers >> np.uint64(30))
    found *= np.uint64(0xBF58476D1CE4E5B9)
    found ^= found >> np.uint64(27)
    found *= np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))


def strict_digest(text: str) -> int:
    """Equal for texts that differ in case, white space and the marks that end sentences alone: not in (, # or a - b."""
    folded = _folded(text).strip()
    if not folded.isascii():
        folded = folded.translate(QUOTES)
    return plain_digest(" ".join(SENTENCE_MARKS.sub(_end_mark, folded).split()) or text)


def _end_mark(match: re.Match[str]) -> str:
    """What is left of marks. 5! is no sentence, and what stands alone is a sign, unless the text ends there."""
    text, (start, stop) = match.string, match.span()
    alone = start == 0 or text[start - 1].isspace()
    if text[start] in "¿¡":
        return "" if alone else match[0]
    if stop < len(text) and (alone or not text[stop].isspace()):
        return match[0]
    letters = start > 1 and text[start - 2 : start].isalpha()
    return "!" if text[start] == "!" and not (alone or letters) else ""


def _hashes(codes: np.ndarray, begin: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(words,) of the places in ``codes`` where words begin, and how long they are."""
    if not len(begin):
        return np.zeros(0, dtype=np.uint64)
    firsts = np.cumsum(lengths) - lengths
    places = np.arange(int(lengths.sum())) - np.repeat(firsts, lengths)
    letters = codes[places + np.repeat(begin, lengths)].astype(np.uint64) + np.uint64(1)
    powers = _powers(LETTER_BASE, 1 << int(lengths.max()).bit_length())
    return mixed(np.add.reduceat(letters * powers[places], firsts))


def _with_signs(codes: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Minus is a word before a digit, a star there and between two words; elsewhere both are punctuation."""
    signs = np.flatnonzero(kinds >= STAR)
    if not len(signs):
        return kinds
    far = np.concatenate([codes, np.zeros(2, dtype=codes.dtype)])
    after, behind = far[signs + 1], far[signs + 2]
    before = np.where(signs > 0, codes[np.maximum(signs, 1) - 1], 0)
    digit = _is_digit(after) | ((after == ord(" ")) & _is_digit(behind))
    spaced = (before == ord(" ")) & (after == ord(" "))
    joined = (_kinds()[np.minimum(before, LAST)] == PART) & (_kinds()[np.minimum(after, LAST)] == PART)
    kinds = kinds.copy()
    kinds[signs] = np.where(digit | ((kinds[signs] == STAR) & (spaced | joined)), ALONE, GAP)
    return kinds


def _is_digit(codes: np.ndarray) -> np.ndarray:
    return (codes >= ord("0")) & (codes <= ord("9"))


@functools.cache
def _kinds() -> np.ndarray:
    """(65,536,) what each character is to a word."""
    kinds = np.zeros(LAST + 1, dtype=np.uint8)
    for code in range(LAST + 1):
        category = unicodedata.category(chr(code))
        if category[0] in "LMN" or category == "Pc":
            kinds[code] = PART
        elif category in ("Sm", "Sc", "So"):
            kinds[code] = ALONE
        elif category == "Cf":
            kinds[code] = DROPPED
    for first, last in UNSPACED:
        among = kinds[first : last + 1]
        among[among == PART] = ALONE
    for letter in APOSTROPHES:
        kinds[ord(letter)] = DROPPED
    for letter in "^%/\\":
        kinds[ord(letter)] = ALONE
    kinds[LAST], kinds[ord("*")], kinds[ord("-")] = ALONE, STAR, MINUS
    return kinds


@functools.lru_cache(maxsize=8)
def _powers(base: np.uint64, count: int) -> np.ndarray:
    """(count,) powers of ``base``, modulo 2 to the 64."""
    return np.multiply.accumulate(np.concatenate([[np.uint64(1)], np.full(max(count - 1, 0), base)]))
