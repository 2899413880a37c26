"""The initial weights of a new model: drawn by seed and name, written a block at a time.

The same seed gives the same bytes on every machine and with every NumPy: the stream of Philox's raw bits is fixed
(Salmon et al. 2011; NumPy's NEP 19 promises it of bit generators, not of their normal numbers), and 16 of these bits
choose one of 65,536 quantiles of the normal distribution from a table. So nothing goes through a library's logarithm.
"""

import functools
import hashlib
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import IO

import numpy as np

from safetrain.core.errors import ConfigError
from safetrain.core.model.shapes import TYPE_BYTES, TYPES, TensorHeader

DTYPES = ("float32", "bfloat16")
BLOCK = 2**20  # weights that are in memory at a time; a multiple of the four that 64 bits give
SHARD_BYTES = 2 * 2**30
QUANTILES, EXACT_BITS = 2**16, 20
INDEX = "model.safetensors.index.json"
RESIDUAL_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


@dataclass(frozen=True)
class InitialWeights:
    """The rule: matrices normal around 0, norms 1. ``seed`` and a tensor's name decide its numbers.

    The standard deviation is sqrt(2 / (5 x width)) ("small init": Nguyen and Salazar 2019, arXiv:1910.05895; taken by
    GPT-NeoX): at a width of 1,000 it is the 0.02 of GPT-2, and narrower models get more, so that logits and the
    outputs of all layers begin at one scale. What a block adds to the residual stream is divided by
    sqrt(2 x layers) (Radford et al. 2019, GPT-2).
    """

    hidden: int
    layers: int
    seed: int
    dtype: str = "float32"

    @property
    def deviation(self) -> float:
        """Standard deviation of the weights."""
        return math.sqrt(2 / (5 * self.hidden))

    @property
    def residual_deviation(self) -> float:
        """That of the matrices whose output is added to the residual stream."""
        return self.deviation / math.sqrt(2 * self.layers)

    def of(self, tensor: TensorHeader) -> Iterator[bytes]:
        """The bytes of one tensor, some MiB at a time, in the order of a safetensors file."""
        count = math.prod(tensor.shape)
        if len(tensor.shape) == 1:
            yield _stored(np.ones(count, dtype=np.float32), self.dtype).tobytes()
            return
        residual = tensor.name.endswith(RESIDUAL_OUTPUTS)
        scaled = normal_quantiles() * (self.residual_deviation if residual else self.deviation)
        table = _stored(scaled.astype(np.float32), self.dtype)
        bits = np.random.Philox(key=_key(self.seed, tensor.name))
        for start in range(0, count, BLOCK):
            size = min(BLOCK, count - start)
            chosen = bits.random_raw(-(-size // 4)).astype("<u8").view("<u2")[:size]
            yield table[chosen].tobytes()


@functools.cache
def normal_quantiles() -> np.ndarray:
    """(65536,) the quantiles of the standard normal distribution in the middle of as many equal parts.

    Rounded to 20 bits behind the point: machines may differ in the last of 52.
    """
    normal = NormalDist()
    half = [normal.inv_cdf((place + 0.5) / QUANTILES) for place in range(QUANTILES // 2)]
    lower = np.rint(np.array(half) * 2**EXACT_BITS) / 2**EXACT_BITS
    return np.concatenate([lower, -lower[::-1]])


def write_weights(folder: Path, tensors: Sequence[TensorHeader], rule: InitialWeights) -> None:
    """model.safetensors, or shards and their index, as Hugging Face names them; raises OSError."""
    shards = _shards(tensors)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            _write_header(file, shard)
            for tensor in shard:
                file.writelines(rule.of(tensor))
    if len(shards) > 1:
        places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.size_bytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def require_dtype(dtype: str) -> None:
    """Raises ConfigError for a type that weights are not stored in."""
    if dtype not in DTYPES:
        raise ConfigError("No such type of weights.", expected=" or ".join(DTYPES), got=dtype)


def weights_bytes(tensors: Sequence[TensorHeader]) -> int:
    """The size of all tensors."""
    return sum(tensor.size_bytes for tensor in tensors)


def _shards(tensors: Sequence[TensorHeader]) -> list[list[TensorHeader]]:
    shards, left = list[list[TensorHeader]](), 0
    for tensor in tensors:
        if not shards or tensor.size_bytes > left:
            shards.append([])
            left = SHARD_BYTES
        shards[-1].append(tensor)
        left -= tensor.size_bytes
    return shards


def _write_header(file: IO[bytes], tensors: Sequence[TensorHeader]) -> None:
    """An 8-byte little-endian length and so many bytes of JSON, a multiple of 8 (huggingface/safetensors, README)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # names and shapes are those of transformers
    place = 0
    for tensor in tensors:
        end = place + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 as it is stored, little-endian; bfloat16 rounded to nearest, ties to even."""
    if TYPE_BYTES[TYPES[dtype]] == 4:
        return values.astype("<f4")
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _key(seed: int, name: str) -> int:
    """128 bits for Philox."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")
