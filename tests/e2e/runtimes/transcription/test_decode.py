"""What is decoded is what was recorded: a tone of 1000 Hz stays one, at its loudness, in every format.

Runs in the runtime's own environment, which has PyAV.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.runtimes.transcription.test_files import FORMATS
from tests.support import hearing
from tests.support.limits import LIMIT_S

ROOT = Path(__file__).parents[4]

MEASURE = """
import io, json, sys, types
sys.path.append(sys.argv[1])
import numpy as np
from runtimes.sdk.audio.decode import decode
from runtimes.sdk.audio.samples import RATE
from runtimes.sdk.worker_pool import Cancel
found = {}
for path in sys.argv[2:]:
    with open(path, "rb") as file:
        samples = decode(file, longest_s=60, cancel=Cancel())
    middle = samples[RATE // 2 : RATE * 3 // 2]
    loudest = int(np.argmax(np.abs(np.fft.rfft(middle))))
    found[path] = [len(samples) / RATE, loudest, float(np.sqrt(np.mean(middle**2))), str(samples.dtype)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, list]:
    paths = [str(hearing.sounds() / f"tone-{name}") for name in FORMATS if name != "stereo.wav"]
    command = [str(hearing.python("faster_whisper")), "-I", "-c", MEASURE, str(ROOT), *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return {Path(path).name: value for path, value in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "stereo.wav"])
def test_a_tone_stays_that_tone(measured, name):
    seconds, hertz, loudness, kind = measured[f"tone-{name}"]
    assert seconds == pytest.approx(2.0, abs=0.1)
    assert hertz == 1000
    assert loudness == pytest.approx(0.3 / 2**0.5, rel=0.05)
    assert kind == "float32"
