"""A day of a large machine in a few minutes: the real scheduler on simulated workers, against simpler policies."""
