"""Declarations of the commands, a room for each subject; `main` puts them together."""
