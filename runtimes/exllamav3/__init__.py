"""EXL3 models on ExLlamaV3, on NVIDIA GPUs. `adapter` is the supervisor's side, `worker` runs in the environment."""
