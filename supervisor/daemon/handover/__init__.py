"""An upgrade: the old daemon hands over, its successor takes over."""
