"""A process of its own that opens an exported adapter as its consumer does, with PyTorch and PEFT, and answers.

    python -m safetrain.engine.exchange.peft_consumer BASE ADAPTER

It says in one line of JSON what it is; then for each line of JSON that it reads, ids and places in them, it writes the
float32 logits (places, vocabulary). Without mlx.
"""

import json
import os
import sys
import warnings


def main(base: str, adapter: str) -> None:
    """Answer until there is nothing to read."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    names = [f"{each.__name__} {each.__version__}" for each in (peft, torch, transformers)]
    vocabulary = model.get_output_embeddings().weight.shape[0]
    answers.write(json.dumps({"opened_by": ", ".join(names), "vocabulary": vocabulary}).encode() + b"\n")
    answers.flush()
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        with torch.inference_mode():
            ids, places = torch.tensor([asked["ids"]]), torch.tensor(asked["places"])
            logits = model(input_ids=ids, logits_to_keep=places).logits[0]
        answers.write(logits.contiguous().numpy().tobytes())
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
