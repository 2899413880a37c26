"""Sends what a run has recorded to W&B, MLflow or TensorBoard. The training process knows nothing of it."""
