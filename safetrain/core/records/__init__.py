"""Records of settings and results: configured, recommended and measured values."""
