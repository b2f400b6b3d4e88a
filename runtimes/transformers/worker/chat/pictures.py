"""Pictures as the model's inputs."""

from __future__ import annotations

from typing import Any

from PIL import Image

from runtimes.sdk.chat.pictures import wrong


def prepared(processor: Any, pictures: list[Image.Image]) -> tuple[dict[str, Any], list[int]]:
    """The model's inputs, and the number of tokens of each image. Raises WorkerError."""
    try:
        features = dict(processor(pictures, return_tensors="pt"))
    except ValueError as error:  # unsupported shapes
        raise wrong(f"the picture can't be used: {error}") from error
    return features, [int(grid.prod()) // processor.merge_size**2 for grid in features["image_grid_thw"]]
