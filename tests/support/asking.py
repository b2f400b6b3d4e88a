"""Parts of chat requests: a tool, a picture."""

from __future__ import annotations

import base64
import io

from PIL import Image


def function(name: str, **properties: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


WEATHER = function("get_weather", city={"type": "string"})


def picture(width: int = 100, height: int = 60, color: str = "red", kind: str = "PNG") -> str:
    data = io.BytesIO()
    Image.new("RGB", (width, height), color).save(data, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"


def looking(*urls: str) -> list[dict[str, object]]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, *parts]}]
