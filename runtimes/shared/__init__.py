"""What adapters and workers of several runtimes both import: standard library only."""
