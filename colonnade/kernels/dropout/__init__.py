"""Dropout without a generator: whether an element is kept is a pure function of what it is."""
