"""What a router computes: experts' scores, and the highest of them."""
