"""A tuned model in the formats of other programs."""
