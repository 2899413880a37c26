"""A new, untrained language model as a folder in the Hugging Face layout."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.model.shapes import TensorHeader, tensors_of
from safetrain.core.storage.files import full_disk_named, require_new, require_room, write_folder, write_json
from safetrain.plan.creation.shapes import AskedShape, ModelShape, shape_for
from safetrain.plan.creation.texts import SAMPLE_MIB, TextSample, read_sample
from safetrain.plan.creation.tokenizers import (
    OWN_IDS,
    SpecialIds,
    TrainedTokenizer,
    copied_ids,
    copied_vocabulary,
    copy_tokenizer,
    require_text,
    require_tokenizer,
    require_vocabulary,
    train_tokenizer,
    write_trained,
)
from safetrain.plan.creation.weights import InitialWeights, require_dtype, weights_bytes, write_weights

FREE = "free some space, choose a smaller model, or --dtype bfloat16"


@dataclass(frozen=True)
class TokenizerOfText:
    """A tokenizer is trained on ``texts``, read once; at most ``sample_mib`` MiB of them. ``where`` names them."""

    texts: Iterable[str]
    where: str
    split_digits: bool = False
    sample_mib: int = SAMPLE_MIB


@dataclass(frozen=True)
class TokenizerOfModel:
    """The tokenizer of the model in ``folder`` is taken as it is."""

    folder: Path


@dataclass(frozen=True)
class CreatedModel:
    """What was made; ``sample`` and ``trained`` are of a tokenizer that was trained."""

    folder: Path
    shape: ModelShape
    weights: InitialWeights
    size_bytes: int
    sample: TextSample | None = None
    trained: TrainedTokenizer | None = None


def create_model(
    folder: Path,
    asked: AskedShape,
    tokenizer: TokenizerOfText | TokenizerOfModel,
    seed: int,
    dtype: str = "float32",
    say: Callable[[str], None] = lambda _text: None,
) -> CreatedModel:
    """Write ``folder``, whole or not at all; ``say`` is told what is being done.

    Raises ConfigError where it exists or the shape is impossible, DataError for texts that cannot be read or are too
    few, ModelError for a folder without a tokenizer, DiskFullError.
    """
    require_new(folder)
    require_dtype(dtype)
    shape_for(asked)  # what is impossible is said before texts are read
    if isinstance(tokenizer, TokenizerOfModel):
        return _with_copied(folder, asked, tokenizer.folder, seed, dtype)
    say(f"{tokenizer.where}: the text is read")
    sample = read_sample(tokenizer.texts, tokenizer.sample_mib * 2**20)
    require_text(sample.sample_bytes, tokenizer.where)
    vocabulary = shape_for(asked, sample.total_bytes).vocabulary
    say(f"a tokenizer of {vocabulary:,} tokens is trained")
    trained = train_tokenizer(sample.texts, vocabulary, split_digits=tokenizer.split_digits)
    if asked.vocabulary is not None:
        require_vocabulary(trained, vocabulary, sample.sample_bytes)
    shape = shape_for(dataclasses.replace(asked, vocabulary=trained.tokens))
    rule = InitialWeights(shape.hidden, shape.layers, seed, dtype)

    def write_tokenizer(into: Path) -> None:
        write_trained(into, trained, shape.context)

    size = _write(folder, shape, OWN_IDS, rule, write_tokenizer)
    return CreatedModel(folder, shape, rule, size, sample, trained)


def _with_copied(folder: Path, asked: AskedShape, source: Path, seed: int, dtype: str) -> CreatedModel:
    require_tokenizer(source)
    shape = shape_for(dataclasses.replace(asked, vocabulary=copied_vocabulary(source)))
    rule = InitialWeights(shape.hidden, shape.layers, seed, dtype)
    size = _write(folder, shape, copied_ids(source), rule, lambda into: copy_tokenizer(source, into))
    return CreatedModel(folder, shape, rule, size)


def _write(
    folder: Path, shape: ModelShape, ids: SpecialIds, rule: InitialWeights, write_tokenizer: Callable[[Path], None]
) -> int:
    """All files, in a hidden folder that is renamed; gives the size of the weights in bytes."""
    config = config_of(shape, ids, rule)
    tensors: tuple[TensorHeader, ...] = tensors_of(config)
    size = weights_bytes(tensors)
    folder.parent.mkdir(parents=True, exist_ok=True)
    require_room(folder.parent, size, "There is no room for the model.", FREE)

    def write(into: Path) -> None:
        write_json(into / "config.json", config)
        write_tokenizer(into)
        write_weights(into, tensors, rule)

    with full_disk_named("The disk is full.", folder.parent, FREE):
        write_folder(folder, write)
    return size


def config_of(shape: ModelShape, ids: SpecialIds, rule: InitialWeights) -> dict[str, object]:
    """config.json, as transformers and mlx-lm read it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.context,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": round(rule.deviation, 6),
        "torch_dtype": rule.dtype,
        "bos_token_id": ids.begin,
        "eos_token_id": list(ids.end) if isinstance(ids.end, tuple) else ids.end,
        "pad_token_id": ids.pad,
    }
