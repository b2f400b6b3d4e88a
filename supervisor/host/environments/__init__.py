"""The runtimes' environments: recipes, installation, and leases of the processes that use them."""
