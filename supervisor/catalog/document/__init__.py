"""The text of a configuration: read with places, edited, written, shown without secrets."""
