"""The worker SDK, the base of this package's worker programs. It runs in a runtime's environment only.

A worker program subclasses `Worker` and calls `serve`; the SDK provides HTTP, health, metrics, queueing, cancellation and
errors. It imports only packages of every worker environment: starlette, uvicorn with httptools and uvloop,
python-multipart, prometheus-client.
"""
