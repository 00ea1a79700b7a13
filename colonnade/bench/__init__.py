"""``colonnade bench``: what this machine can do at most, and which part of it decoding reaches."""
