"""llmux: one GPU box, every model.

`core` decides (pure), `io` does (processes, sockets, memory), `engine` connects them as the single writer, `proxy` moves
bytes, `http` and `cli` are the edges. See docs/architecture.md.
"""
