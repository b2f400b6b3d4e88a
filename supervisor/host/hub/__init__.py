"""Model hubs: the listings of repositories, and downloads of their files."""
