"""The benchmark: `python -m bench` (or `make bench`). Nothing here is imported by the product."""
