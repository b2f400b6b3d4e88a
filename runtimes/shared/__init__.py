"""Modules that both adapters and workers of several runtimes import: standard library only."""
