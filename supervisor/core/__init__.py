"""The decision logic: a deterministic state machine from events to effects. No clock, no I/O, no asyncio, no logging."""
