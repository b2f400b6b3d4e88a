"""Code that the adapters of several runtimes share. The supervisor imports it, a worker never does."""
