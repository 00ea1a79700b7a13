"""Evaluation: lm-eval's tasks with our forward pass and engine, zero-shot WikiText-103 and LAMBADA, report pages."""
