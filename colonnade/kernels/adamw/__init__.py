"""The end of an optimizer step in one pass: clip, AdamW on float32 masters, and the weights in the compute type."""
