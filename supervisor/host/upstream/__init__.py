"""Connections to workers and remote models, and probes of them."""
