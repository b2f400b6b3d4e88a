"""The command `llm`, with a model of the daemon's in its `extra-openai-models.yaml`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    model = {"model_id": "home", "model_name": "quick", "api_base": f"{sys.argv[1]}/v1", "api_key_name": "none"}
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model]))
    environ = {**os.environ, "LLM_USER_PATH": folder}
    llm = [Path(sys.executable).with_name("llm"), "prompt", "--no-log", "-m", "home", "--key", "any"]
    asked = {"whole": [*llm, "--no-stream", "Hello"], "streamed": [*llm, "Hello"]}
    found = {
        name: subprocess.run(c, env=environ, check=True, capture_output=True, text=True).stdout.strip()
        for name, c in asked.items()
    }

json.dump(found, sys.stdout)
