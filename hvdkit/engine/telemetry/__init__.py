"""What is told of what runs: timeline, statistics, signs of life, hashes of what is trained."""
