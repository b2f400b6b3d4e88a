"""Memory: the ledger of each device, footprints, and leases of partners."""
