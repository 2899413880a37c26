"""What is put on the path of a training process to hit it."""
