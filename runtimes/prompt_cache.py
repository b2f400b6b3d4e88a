"""The controls of the prompt cache in a runtime's workers: fields of requests, and paths of the worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptCache:
    """The prompt cache of a runtime's workers. The defaults describe a worker whose cache never outlives a request."""

    is_kept: bool = False  # beginnings of prompts are used again by later requests
    paths: frozenset[str] = frozenset()  # the worker's paths for requests with these fields:
    reuse_field: str | None = None  # a boolean: may the request use the cache?
    salt_field: str | None = None  # a text: only requests with the same one use each other's prompts
    slots_path: str | None = None  # GET lists the slots; POST `/ID?action=erase` below it erases one's cache


NO_CACHE = PromptCache()
