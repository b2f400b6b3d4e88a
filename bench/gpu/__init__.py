"""What models take and do on a real NVIDIA GPU, through a real daemon: for `tests/gpu`, which judges, and `bench.gpu`, which tells.

`subjects` has the models of each runtime, `card` reads the GPU, `measures` drives the daemon, `page` keeps the figures. All of it
runs in CI as well, with a scripted driver and workers that pretend to take its memory (tests/gpu/test_suite.py).
"""
