"""The runtimes' environments: what goes into one, how it is built, who uses it."""
