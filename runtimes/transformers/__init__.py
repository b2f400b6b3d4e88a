"""Models for Hugging Face's transformers: language models and speech recognition, in one environment.

`adapter` delegates to the `Kind` of a model's type. `worker/chat` and `worker/transcribe` are the worker programs.
"""
