"""Memory that a run needs, the memory available to it, and what the system reports about it."""
