"""What a run takes of memory, what it may take, and what this machine has taught."""
