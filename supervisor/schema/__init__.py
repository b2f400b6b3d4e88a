"""The types of the daemon's API: the daemon makes the objects, the API encodes them, the command line decodes them.

Each field's meaning is defined here, once; `/openapi.json`, docs/reference/api.md and the checks of requests follow from it.
"""
