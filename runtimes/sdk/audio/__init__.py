"""Sound: from a client's file to samples, and from what was heard to the formats that clients ask for.

For environments that have PyAV and NumPy.
"""
