"""The runtimes: one folder each, all behind the contract in `runtimes.base`. Nothing here imports the supervisor.

A file's folder shows which interpreter runs it. `adapter` (or `adapter.py`), `adapters`, `base` and `registry` are imported by
the supervisor. `worker` (or `worker.py`) and `sdk` run in the environment of their runtime, which has none of the supervisor's
packages. Both sides import `shared`, which therefore needs the standard library only.
"""
