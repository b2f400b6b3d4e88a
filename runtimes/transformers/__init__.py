"""Models of Hugging Face's transformers: language models (`chat`) and speech recognition (`transcribe`), one environment.

This level is the supervisor's side and imports neither torch nor transformers: `adapter` asks the `Kind` of a model's
type. `chat` and `transcribe` are the worker programs, which run in the runtime's own environment.
"""
