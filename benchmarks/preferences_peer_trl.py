"""TRL's side of bench_preferences: DPOTrainer or ORPOTrainer on given pairs and a given adapter; prints JSON.

    python benchmarks/preferences_peer_trl.py JOB.json

Needs trl, torch, transformers, peft and datasets, and nothing of safetrain. Texts are numbers; each is one token.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer


def main(job: dict[str, Any]) -> None:
    """Train and print each step's loss and gradient norm."""
    torch.set_num_threads(2)
    words = {str(number): number for number in range(job["vocabulary"])}
    words["</s>"] = words.pop(str(job["end"]))
    own = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", pad_token="</s>")
    base = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, job["adapter"], is_trainable=True)
    config: Any = DPOConfig if job["method"] == "dpo" else ORPOConfig
    trainer_of: Any = DPOTrainer if job["method"] == "dpo" else ORPOTrainer
    arguments = config(
        output_dir=job["out"], beta=job["beta"], learning_rate=job["rate"], max_steps=job["steps"], max_length=512,
        per_device_train_batch_size=job["pairs"], lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        disable_dropout=True, disable_tqdm=True, logging_nan_inf_filter=False,
    )  # fmt: skip

    class InOrder(trainer_of):
        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    data = Dataset.from_list(job["rows"])
    test = Dataset.from_list(job["test"]) if job["test"] else None
    trainer = InOrder(
        model=model, args=arguments, train_dataset=data, eval_dataset=test, processing_class=tokenizer
    )  # fmt: skip
    began = time.perf_counter()
    trainer.train()
    found = {"seconds": time.perf_counter() - began}
    steps = [step for step in trainer.state.log_history if "grad_norm" in step]
    if test is not None:
        scores = trainer.evaluate()
        found |= {"accuracy": scores["eval_rewards/accuracies"], "margin": scores["eval_rewards/margins"]}
    found["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("\n" + json.dumps({**found, "steps": [[step["loss"], step["grad_norm"]] for step in steps]}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
