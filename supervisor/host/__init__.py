"""Everything that the operating system can refuse."""
