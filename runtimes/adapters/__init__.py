"""What the adapters of several runtimes share. Imported by the supervisor, never by a worker."""
