"""Makes mlx fast on a Linux CPU. A GPU uses none of it."""
