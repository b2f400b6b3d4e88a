"""Streaming parsers for the formats in which models write reasoning, answers and tool calls.

A parser gives the same result however the text is cut into pieces. It keeps ambiguous text (half a marker, blanks that may
precede one) until the meaning is certain.
"""
