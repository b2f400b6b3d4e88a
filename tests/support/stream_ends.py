"""What a translated stream ends with, also where its worker's error has ended it already."""

from supervisor.gateway.filters.stream_end import StreamFailedError


def ended(stream) -> bytes:
    try:
        return stream.end()
    except StreamFailedError:
        return b""
