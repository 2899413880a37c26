"""The memory that a run needs, the memory that is available, and the system's readings of both."""
