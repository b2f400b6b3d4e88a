"""Workers' lives: starts, ends, drains, replicas."""
