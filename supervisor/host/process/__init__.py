"""Processes: started below a shim, watched, ended with all that they started; their ports and logs."""
