"""Memory: what a run takes, what it may take, and what earlier runs have shown."""
