"""Streaming parsers for the formats in which models write reasoning, answers and tool calls.

A parser gives the same result however the text is cut into pieces. What is ambiguous (half a marker, blanks that may
precede one) is held back until it is certain.
"""
