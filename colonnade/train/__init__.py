"""Training: the loop, one step of it, the optimizer, and what is noted on the way."""
