"""``colonnade bench``: the upper bounds of this machine, and the share of them that decoding reaches."""
