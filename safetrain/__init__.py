"""safetrain decides before it spends hours, trains exactly, survives anything, and shows what happened."""
