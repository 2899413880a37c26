"""What makes mlx fast on a Linux CPU, and nothing else. A GPU uses none of it."""
