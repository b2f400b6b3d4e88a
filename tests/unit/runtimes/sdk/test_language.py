"""What the shared parts of a worker know of a loaded model."""

from __future__ import annotations

from runtimes.sdk.chat.language import defaults_of

GENERATION = {"do_sample": True, "temperature": 0.7, "top_p": None, "min_p": 0.05, "eos_token_id": 2}


def test_a_models_own_values_of_sampling():
    assert defaults_of(GENERATION) == {"temperature": 0.7, "min_p": 0.05}
    assert defaults_of(GENERATION, ("temperature", "top_k")) == {"temperature": 0.7}


def test_none_of_a_model_that_does_not_sample():
    assert defaults_of({**GENERATION, "do_sample": False}) == {}
    assert defaults_of({}) == {}
