"""The declarations of the commands, one module a subject; `main` collects them."""
