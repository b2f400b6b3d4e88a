"""The commands, one module a subject; `main` collects them."""
