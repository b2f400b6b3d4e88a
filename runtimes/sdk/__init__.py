"""What the worker programs written here share. Runs in a runtime's own environment, never in the supervisor's.

A worker program names its model's class and calls `serve`; the kit does HTTP, health, metrics, turns, cancellation and
errors. It may import what every worker environment has (starlette, uvicorn, python-multipart, prometheus-client) and
nothing heavier; `runtimes.base` and the supervisor's packages are not there.
"""
