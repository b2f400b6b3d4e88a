"""`llmux runtimes`: the environments of the runtimes, and the proof that each computes."""
