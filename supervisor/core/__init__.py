"""The decisions: a deterministic state machine, events in and effects out. No clock, no I/O, no asyncio, no logging."""
