"""Changes of a running daemon's configuration: edits, reloads, sets, models that are added."""
