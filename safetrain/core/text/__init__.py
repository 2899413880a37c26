"""Texts: the model's tokenizer and chat template, and words."""
