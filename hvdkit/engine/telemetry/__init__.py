"""Records of the engine's work: timeline, statistics, signs of life, hashes of parameters."""
