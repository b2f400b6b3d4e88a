"""How long a test waits at most for what only a broken program doesn't do.

Long enough for a machine that is busy with others; shorter only where something is promised within a time.
"""

LIMIT_S = 240.0


def pause_s(waited_s: float) -> float:
    """Until one asks again whether it is true: what takes long is asked for less often, for asking takes processors as well."""
    return min(0.1, 0.01 + waited_s / 8)
