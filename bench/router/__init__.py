"""llama.cpp's router and llmux before the same llama-server and the same models: `python -m bench.router`."""
