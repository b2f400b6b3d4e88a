"""Programs that come as archives of their project's releases: found, fetched, checked, unpacked."""
