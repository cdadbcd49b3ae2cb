"""Measuring: every policy and both baselines on the same prompts, in one process, interleaved."""
