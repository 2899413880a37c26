"""Builds models/encyclopedia-3m from nothing: ``python -m models.recipe.build`` (seeded, under an hour on two cores).

Text from text.py, a byte-level BPE of 2,048 tokens trained on it, a 3-million-parameter Llama trained from random
weights, the last quarter with its weights rounded to 4 bits in the forward pass (straight-through gradient), so that
quantizing at the end changes nothing. The model reads facts; it never sees a question.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

from safetrain.engine.blas import load_fast_blas

load_fast_blas()

import mlx.core as mx  # noqa: E402  (the BLAS must be loaded first)
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402
from mlx_lm.models.llama import Model, ModelArgs  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

from models.recipe.text import Subject, document, subjects  # noqa: E402

SEED = 7
END, PAD, SYSTEM, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"
BITS, GROUP = 4, 64
VOCABULARY = 2048
END_ID, PAD_ID = 0, 1
ROW_TOKENS = 64
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
}


@dataclass(frozen=True)
class Schedule:
    """How a model is trained on the text."""

    tokens: int
    batch_rows: int = 32
    peak_learning_rate: float = 3e-3
    warmup_steps: int = 100
    rounded_share: float = 0.25  # of the steps, the last ones, with weights rounded to 4 bits


def main() -> None:
    """Build the model; prints the loss and the share of facts known as it goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=5_000_000, help="tokens to train on")
    parser.add_argument("--output", type=Path, default=Path("models/encyclopedia-3m"))
    arguments = parser.parse_args()
    build(arguments.output, CONFIG, Schedule(arguments.tokens))


def build(output: Path, config: dict[str, object], schedule: Schedule) -> None:
    """A Llama of ``config`` from random weights, trained and quantized, in the folder ``output``."""
    random_source = random.Random(SEED)
    known = subjects()
    tokenizer = train_tokenizer([document(s, random_source) for _ in range(40) for s in known])
    model = Model(ModelArgs.from_dict(config))
    mx.random.seed(SEED)
    model.update(initial_weights(model))
    train(model, known, tokenizer, schedule, random_source)
    nn.quantize(model, group_size=GROUP, bits=BITS)
    save(model, config, tokenizer, output)
    print(f"quantized: knows {100 * share_known(model, known, tokenizer):.1f} % of the facts")


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE over ``texts``; ids 0 to 4 are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def initial_weights(model: Model) -> dict:
    """Normal weights of standard deviation 0.02 for matrices, ones for norms."""
    return tree_map(lambda w: 0.02 * mx.random.normal(w.shape) if w.ndim == 2 else w, model.parameters())


def train(model: Model, known: list[Subject], tokenizer: Tokenizer, how: Schedule, source: random.Random) -> None:
    """AdamW with a linear decay over rows packed from one endless stream of documents."""
    steps = how.tokens // (ROW_TOKENS * how.batch_rows)
    rows = token_rows(known, tokenizer, steps * how.batch_rows, source)
    optimizer = optim.AdamW(how.peak_learning_rate, betas=[0.9, 0.98], weight_decay=0.01)
    params, began = model.trainable_parameters(), time.perf_counter()
    for step in range(steps):
        batch = mx.array(rows[step * how.batch_rows : (step + 1) * how.batch_rows])
        rounded = step >= (1 - how.rounded_share) * steps
        loss, gradients = mx.value_and_grad(lambda p, b=batch, r=rounded: next_token_loss(model, p, b, r))(params)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.learning_rate = how.peak_learning_rate * min((step + 1) / how.warmup_steps, (steps - step) / steps)
        params = optimizer.apply_gradients(gradients, params)
        mx.eval(loss, params, optimizer.state)
        if step % 100 == 0 or step == steps - 1:
            model.update(fake_quantized(params) if rounded else params)
            speed = (step + 1) * ROW_TOKENS * how.batch_rows / (time.perf_counter() - began)
            facts = share_known(model, known[::4], tokenizer)
            print(f"step {step}/{steps} loss {loss.item():.3f} facts {100 * facts:.1f} % {speed:.0f} tok/s", flush=True)
    model.update(params)


def token_rows(known: list[Subject], tokenizer: Tokenizer, count: int, source: random.Random) -> np.ndarray:
    """(count, ROW_TOKENS + 1) token ids: documents of random subjects, each closed by END, cut into rows."""
    needed = count * (ROW_TOKENS + 1)
    stream: list[int] = []
    while len(stream) < needed:
        order = source.sample(known, len(known))
        for encoded in tokenizer.encode_batch([document(subject, source) for subject in order]):
            stream.extend([*encoded.ids, END_ID])
    return np.array(stream[:needed], dtype=np.int32).reshape(count, ROW_TOKENS + 1)


def next_token_loss(model: Model, params: dict, batch: mx.array, rounded: bool) -> mx.array:
    """Mean cross-entropy of each token given those before it; ``batch`` is (rows, ROW_TOKENS + 1)."""
    model.update(fake_quantized(params) if rounded else params)
    logits = model(batch[:, :-1])  # (rows, ROW_TOKENS, vocabulary)
    return nn.losses.cross_entropy(logits, batch[:, 1:]).mean()


def fake_quantized(params: dict) -> dict:
    """The matrices as they will be after 4-bit quantization, with the gradient of the unrounded ones."""

    def rounded(weight: mx.array) -> mx.array:
        if weight.ndim != 2:
            return weight
        packed = mx.quantize(mx.stop_gradient(weight), group_size=GROUP, bits=BITS)
        return weight + mx.stop_gradient(mx.dequantize(*packed, group_size=GROUP, bits=BITS) - weight)

    return tree_map(rounded, params)


def share_known(model: Model, known: list[Subject], tokenizer: Tokenizer) -> float:
    """Share of the facts whose first wording the model completes correctly, token by token."""
    right = total = 0
    for subject in known:
        for fact in subject.facts:
            sentence = fact.statements[0]
            ids = [END_ID, *tokenizer.encode(sentence).ids]
            value_start = len(tokenizer.encode(sentence.rsplit(" ", 1)[0]).ids) + 1
            guesses = np.array(mx.argmax(model(mx.array([ids[:-1]])), axis=-1))[0].tolist()
            right += guesses[value_start - 1 :] == ids[value_start:]
            total += 1
    return right / total


def save(model: Model, config: dict[str, object], tokenizer: Tokenizer, folder: Path) -> None:
    """Write the Hugging Face layout that ``mlx_lm.load`` opens."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config, "quantization": {"group_size": GROUP, "bits": BITS}}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, value in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
