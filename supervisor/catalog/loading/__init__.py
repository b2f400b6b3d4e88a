"""Where a configuration comes from: files, variables, folders."""
