"""How models write thoughts, answers and tool calls, taken apart while they are being written.

A parser gets the text in whatever pieces it comes and gives the same result for every way of cutting it. What can't be
told yet (half a marker, blanks that may stand before one) is held back until it can.
"""
