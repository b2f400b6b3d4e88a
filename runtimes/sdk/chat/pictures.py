"""Images in messages: data URLs only, decoded. Nothing is downloaded."""

from __future__ import annotations

from PIL import Image

from runtimes.sdk.chat.messages import TakePicture
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.pictures import MAX_PIXELS, picture, unusable


def taker(images: list[Image.Image]) -> TakePicture:
    """A function that adds a request's pictures to `images`. All of them together may have at most MAX_PIXELS."""

    def take(url: object) -> None:
        images.append(picture(url, MAX_PIXELS - sum(image.width * image.height for image in images)))

    return take


def unusable_picture(message: str) -> WorkerError:
    """The error for a picture that can't be used."""
    return unusable("messages", message)
