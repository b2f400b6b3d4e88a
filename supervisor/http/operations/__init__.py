"""What each module of routes in this room serves: see `supervisor.dialects.operation`."""
