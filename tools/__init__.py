"""Tools for maintainers; `make help` lists the commands. Not part of the distribution."""
