"""GGUF models on llama-cpp-python, within the worker's own process. `adapter` runs in the supervisor, `worker` in the worker."""
