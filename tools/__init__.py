"""What maintainers run; `make help` says how. Not part of the distribution."""
