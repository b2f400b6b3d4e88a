"""The lifecycle of workers: starts, ends, drains, replicas."""
