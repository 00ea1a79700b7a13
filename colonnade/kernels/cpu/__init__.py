"""Kernels of decode steps on a CPU, in C++: the source, its compilation, and the functions that call it."""
