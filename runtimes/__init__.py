"""The runtimes: one folder each, all behind the contract in `runtimes.base`. Nothing here imports the supervisor."""
