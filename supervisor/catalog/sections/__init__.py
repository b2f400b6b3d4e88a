"""The sections of a configuration, as strict models."""
