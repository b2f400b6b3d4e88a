"""GGUF models on llama-cpp-python, within the worker's own process. `adapter` is the supervisor's side, `worker` the other."""
