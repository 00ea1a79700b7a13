"""Transducer (RNN-T) lattices: forward and backward scores of all alignments."""
