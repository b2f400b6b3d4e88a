"""Admission: who is served next, who waits, who is refused."""
