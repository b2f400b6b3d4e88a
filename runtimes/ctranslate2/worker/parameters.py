"""The parameters that this worker treats differently from the other language model workers."""

from __future__ import annotations

from typing import Final

from runtimes.sdk.chat import parameters
from runtimes.sdk.parameters import Table, ignored, refused, used

_SAMPLING: Final[Table] = {
    "temperature": used(
        "0: always the likeliest token. Default: the model's generation_config.json, else 1; for translations 0"
    ),
    "top_k": used("0 or -1: off; default as with temperature"),
    "min_p": refused("CTranslate2 has no such sampling", 0),
    "beam_size": used(
        "1 to 20; above 1 the likeliest answer is searched: it comes whole, and is not sampled. Default: the key"
    ),
    "repetition_penalty": used("over what was generated"),
    "presence_penalty": refused("CTranslate2 has repetition_penalty only", 0),
    "frequency_penalty": refused("CTranslate2 has repetition_penalty only", 0),
    "logit_bias": refused("CTranslate2 has none", {}),
    "seed": ignored("CTranslate2 has one random generator for all requests"),
    "source_lang_code": used("for translation models whose vocabulary has languages; in a message's part as well"),
    "target_lang_code": used("needed by the same models: `deu_Latn` for NLLB, `de` for M2M-100 and MADLAD-400"),
}

CHAT: Final[Table] = {
    **parameters.CHAT,
    **_SAMPLING,
    "messages": used("text: one message of the user; for language models the system may speak before it"),
    "logprobs": used("of the answer's tokens, not with beam_size above 1"),
    "top_logprobs": refused("CTranslate2 tells no alternatives", 0),
    "tools": refused("there are single turns only, and a tool's result would be another", []),
    "tool_choice": refused("there are no tools here", "none", "auto"),
    "parallel_tool_calls": ignored("there are no tools here"),
    "response_format": refused("this runtime can't hold an answer to a schema", {"type": "text"}),
}

COMPLETIONS: Final[Table] = {
    **parameters.COMPLETIONS,
    **_SAMPLING,
    "prompt": used("a text, or a list of token ids; for translation models the text to translate"),
    "logprobs": refused("CTranslate2 tells no alternatives; 0 tells the tokens' own", 0, False),
}
