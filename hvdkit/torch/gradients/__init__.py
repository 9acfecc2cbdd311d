"""From a backward pass to the reduced gradients of a step."""
