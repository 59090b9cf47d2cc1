"""Training and shaping in one loop: the step, the loop, many runs at once, checkpoints."""
