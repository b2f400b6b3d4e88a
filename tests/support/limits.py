"""How long a test waits at most for what only a broken program doesn't do.

Long enough for a machine that is busy with others; shorter only where something is promised within a time.
"""

LIMIT_S = 240.0
