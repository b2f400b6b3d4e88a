"""Model hubs: what a repository has, and how its files are fetched."""
