# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tune a model, and see what it learned
#
# This notebook runs the pipeline on the example that ships with safetrain: a small model that has read an encyclopedia
# learns to answer questions. Interrupt the cell that trains, and the training saves its state and stops; run the cell
# again, and it continues.
#
# `experiment=minimal` is a first look: 100 examples, 3 epochs, about a minute. Leave it out for the whole example.

# %%
import os
import subprocess
import sys
from pathlib import Path

here = Path.cwd()
os.chdir(next(folder for folder in (here, *here.parents) if (folder / "params.yaml").is_file()))
OVERRIDES = os.environ.get("SAFETRAIN_NOTEBOOK", "experiment=minimal").split()


def safetrain(*words: str) -> None:
    """Run a command and show what it prints."""
    command = [sys.executable, "-m", "safetrain.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            print(line, end="")


# %% [markdown]
# ## Run it

# %%
safetrain("run", *OVERRIDES)

# %% [markdown]
# Base and tuned side by side:

# %%
import json

evaluation = json.loads(Path("checkpoints_qlora/evaluation.json").read_text())
for sample in evaluation["samples"][:3]:
    print(f"{sample['question']}\n  base:  {sample['base']}\n  tuned: {sample['tuned']}\n")

# %% [markdown]
# ## How it went

# %%
from IPython.display import IFrame, Image, display

display(Image("checkpoints_qlora/plots/loss.png", width=600))

# %% [markdown]
# Everything on one page (a browser shows it here; it is a file that needs no network):

# %%
report = Path("checkpoints_qlora/report.html")
display(IFrame(f"../{report}", "100%", 600)) if report.is_file() else print("there is no report page")

# %% [markdown]
# ## Ask it
#
# Your own data: put a file into `data/`, its path into `params.yaml`, and run the cells again.

# %%
safetrain("ask", "What is the atomic number of neon?", "--base")

# %% [markdown]
# If a training run ends badly, this says why, and what to do:

# %%
safetrain("diagnose")
