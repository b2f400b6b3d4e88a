"""Measure models on a real NVIDIA GPU, through a real daemon: for `tests/gpu`, which asserts, and `bench.gpu`, which reports.

`subjects` has the models of each runtime, `card` reads the GPU, `measures` drives the daemon, `page` stores the figures. CI
runs all of this with a scripted driver and workers that pretend to take its memory (tests/gpu/test_suite.py).
"""
