"""Loads a configuration from files, variables and folders."""
