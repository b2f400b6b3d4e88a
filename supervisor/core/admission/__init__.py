"""Admission: the order of requests, and which of them are dispatched, queued or rejected."""
