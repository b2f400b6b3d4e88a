"""What the daemon's API takes and gives, as types: the daemon makes them, the API writes them, the command line reads them.

A field says here what it means, once; `/openapi.json`, docs/reference/api.md and the checks of requests follow from it.
"""
