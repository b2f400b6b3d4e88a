"""llmux: one GPU box, every model.

`core` decides (pure), `host` does (processes, sockets, memory), `engine` connects them as the single writer, `gateway` moves
requests, `server` and `cli` are the edges. See docs/architecture.md.
"""
