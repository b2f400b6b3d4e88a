"""How the embedding worker treats each parameter of a request: used, ignored or refused."""

from __future__ import annotations

from typing import Final

from runtimes.sdk.parameters import Table, ignored, refused, used

EMBEDDINGS: Final[Table] = {
    "model": used("Chooses the model; the supervisor has done so."),
    "input": used("A text, texts, token ids of this model's own tokenizer, or lists of such ids; at most 2048."),
    "encoding_format": used("float, or base64: little-endian float32."),
    "dimensions": used(
        "So many leading values, scaled to length 1 again; sound for models trained for it (Matryoshka)."
    ),
    "prompt_name": used("One of the model's own prompts, such as query or document, is put before each text."),
    "truncate": used("true: cut texts that are too long instead of refusing them. Default: as configured."),
    "user": ignored("It is for the operator of a remote API."),
    "input_type": refused(
        "say prompt_name instead; the model's own names are listed in its config_sentence_transformers.json"
    ),
}

VISION: Final[Table] = {
    "model": EMBEDDINGS["model"],
    "input": used(
        "A text or a picture, or at most 2048 of them. A picture is a `data:` URL, "
        '`{"type": "image_url", "image_url": {"url": "data:…"}}` or `{"image": "data:…"}`; a text may be '
        '`{"type": "text", "text": "…"}`.'
    ),
    "candidate_labels": used(
        "Zero-shot classification: each picture gets a score for each label, in the labels' order. With CLIP they sum to one, "
        "with SigLIP each label is judged by itself. At most 262,144 scores in a request."
    ),
    "hypothesis_template": used(
        'What is compared for a label, with {} in its place. Default: "This is a photo of {}."'
    ),
    "encoding_format": EMBEDDINGS["encoding_format"],
    "dimensions": EMBEDDINGS["dimensions"],
    "truncate": EMBEDDINGS["truncate"],
    "user": EMBEDDINGS["user"],
    "messages": refused("send pictures and texts as input; one vector for both together is not what these models make"),
    "modality": refused("each input says what it is: a picture is a data: URL, anything else a text", "text"),
    "prompt_name": refused("models that see have no prompts"),
}

RERANK: Final[Table] = {
    "model": used("Chooses the model; the supervisor has done so."),
    "query": used("What the documents are compared with."),
    "documents": used("Texts, or objects with a text; at most 2048."),
    "top_n": used("Only the best so many. Default: all."),
    "return_documents": used("true: each result holds its document."),
    "truncate": used("true: cut documents that are too long instead of refusing them. Default: as configured."),
    "user": ignored("It is for the operator of a remote API."),
    "rank_fields": refused("documents with several fields are not supported; send one text each"),
    "max_chunks_per_doc": refused("long documents are not split here", 1),
    "max_tokens_per_doc": used("Only the first so many tokens of each document are compared. Default: all of them."),
    "relevant_spans": refused("only whole documents are compared here", {"mode": "disabled"}),
    "priority": ignored("It is for the operator of a remote API."),
}
