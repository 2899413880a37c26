"""Complete settings of a small training, for benchmarks and tests to change what they need."""

from safetrain.core.records.settings import LoraSettings, TrainSettings

SETTINGS = TrainSettings(
    method="lora", optimizer="adam", schedule="cosine", batch_size=2, gradient_accumulation=2, max_seq_length=64,
    learning_rate=5e-3, num_epochs=3, max_steps=None, max_examples=None, warmup_steps=2, save_steps=2, eval_steps=3,
    log_steps=1, max_grad_norm=1.0, weight_decay=0.0, early_stopping_patience=None,
    max_loss_jump=None, dequantize_base=True, gradient_checkpointing=False, seed=7,
    lora=LoraSettings(4, 2.0, 0.0, 2, ("all-linear",)),
)  # fmt: skip
