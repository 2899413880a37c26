"""What makes the environment and the documentation."""
