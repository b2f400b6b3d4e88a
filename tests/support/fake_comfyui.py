"""A ComfyUI without its engine: a checkout whose main.py starts, queues, draws and is interrupted as the real server is.

It follows server.py and execution.py of ComfyUI 0.3.64: `/prompt` checks a workflow against what its nodes take, `/ws` tells of
the steps, with a preview after each if `--preview-method` wants them, `/history` names files, `/view` gives them. Nodes:
Painter (a checkpoint, a text, a seed, steps, sizes; its picture is of one colour, by the seed), LoadImage, SaveImage. A
prompt that begins with "!" plays a trick: "!error" fails in the node, "!hang" goes on until it is interrupted, "!die" kills the
server, "!close" closes the websocket.

`checkout(folder)` writes one. In the environment of the runtime's worker, whose websockets it uses.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from tests.support import fake_programs
from tests.support.fake_media import png

CHECKPOINTS = ["one.safetensors", "two.safetensors"]
FLOW = {
    "1": {
        "class_type": "Painter",
        "inputs": {
            "ckpt_name": "one.safetensors",
            "text": "x",
            "seed": 1,
            "steps": 4,
            "cfg": 7.0,
            "width": 64,
            "height": 48,
            "batch_size": 1,
        },
        "_meta": {"title": "The painter"},
    },
    "2": {"class_type": "SaveImage", "inputs": {"filename_prefix": "made", "images": ["1", 0]}},
}
INPUTS = {
    "prompt": "The painter.text",
    "seed": "1.seed",
    "steps": "1.steps",
    "guidance": "1.cfg",
    "width": "1.width",
    "height": "1.height",
    "checkpoint": "1.ckpt_name",
}
CHANGING = {
    **FLOW,
    "3": {"class_type": "LoadImage", "inputs": {"image": "example.png"}},
    "1": {**FLOW["1"], "inputs": {**FLOW["1"]["inputs"], "picture": ["3", 0]}},
}


def checkout(folder: Path) -> Path:
    """A checkout, and the workflows `flow.json` and `changing.json` beside it."""
    place = folder / "ComfyUI"
    checkpoints = place / "models" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in CHECKPOINTS:
        (checkpoints / name).write_bytes(bytes(1 << 20))
    (place / "main.py").write_text(fake_programs.code("fake_comfyui.run"))
    (folder / "flow.json").write_text(json.dumps(FLOW))
    (folder / "changing.json").write_text(json.dumps(CHANGING))
    return place


# ----------------------------------------------------------------------------------------------------------- the server


def preview(step: int) -> bytes:
    """Begins as a JPEG does."""
    return b"\xff\xd8\xff after step %d" % step


TAKES = {
    "Painter": {
        "ckpt_name": [CHECKPOINTS],
        "text": ["STRING", {}],
        "seed": ["INT", {}],
        "steps": ["INT", {"max": 10_000}],
        "cfg": ["FLOAT", {}],
        "width": ["INT", {}],
        "height": ["INT", {}],
        "batch_size": ["INT", {}],
    },
    "LoadImage": {"image": [[], {"image_upload": True}]},
    "SaveImage": {"filename_prefix": ["STRING", {}], "images": ["IMAGE"]},
}


def run(words: list[str]) -> int:
    import asyncio
    import os
    import signal
    from urllib.parse import parse_qs, urlsplit

    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import UploadFile
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route, WebSocketRoute
    from starlette.websockets import WebSocket, WebSocketDisconnect

    print("argv:", json.dumps(words), flush=True)

    def said(option: str) -> str:
        return words[words.index(option) + 1]

    methods = [method for word, method in pairwise(words) if word == "--preview-method"]
    previews = bool(methods) and methods[-1] != "none"  # the last counts, as argparse has it
    sockets: dict[str, WebSocket] = {}
    queue: asyncio.Queue = asyncio.Queue()
    deleted: set[str] = set()
    history: dict[str, dict] = {}
    interrupted = asyncio.Event()
    running: list[str] = []
    made = 0

    async def tell(client: str, kind: str, **data: object) -> None:
        if client in sockets:
            await sockets[client].send_text(json.dumps({"type": kind, "data": data}))

    async def ws(socket: WebSocket) -> None:
        await socket.accept()
        client = socket.query_params["clientId"]
        sockets[client] = socket
        await tell(client, "status", status={"exec_info": {"queue_remaining": 0}}, sid=client)
        await socket.send_bytes(b"\0\0\0\3\0\0\0\1" + b"1a text of a node")
        try:
            while True:
                await socket.receive_text()
        except WebSocketDisconnect:
            sockets.pop(client, None)

    async def prompt(request: Request) -> Response:
        asked = await request.json()
        print("prompt:", json.dumps(asked["prompt"]), flush=True)
        errors: dict[str, dict] = {}
        for number, node in asked["prompt"].items():
            for name, takes in TAKES[node["class_type"]].items():
                value = node["inputs"].get(name)
                if name == "ckpt_name" and value not in takes[0]:
                    details = f"{name}: '{value}' not in {takes[0]}"
                    errors[number] = {
                        "errors": [{"type": "value_not_in_list", "message": "Value not in list", "details": details}],
                        "class_type": node["class_type"],
                    }
        if errors:
            error = {"type": "prompt_outputs_failed_validation", "message": "Prompt outputs failed validation"}
            return JSONResponse({"error": error, "node_errors": errors}, 400)
        queue.put_nowait((asked["prompt_id"], asked["client_id"], asked["prompt"]))
        return JSONResponse({"prompt_id": asked["prompt_id"], "number": 0, "node_errors": {}})

    async def draw(number: str, client: str, nodes: dict) -> None:
        nonlocal made
        await tell(client, "execution_start", prompt_id=number)
        painter = nodes["1"]["inputs"]
        trick = painter["text"] if painter["text"].startswith("!") else ""
        if trick == "!die":
            os.kill(os.getpid(), signal.SIGKILL)
        if trick == "!close":
            await sockets[client].close()
            return
        if trick == "!error":
            about = {"node_id": "1", "node_type": "Painter", "exception_message": "the brush broke"}
            await tell(client, "execution_error", prompt_id=number, **about)
            return
        if "3" in nodes and not Path(said("--input-directory"), nodes["3"]["inputs"]["image"]).read_bytes():
            about = {"node_id": "3", "node_type": "LoadImage", "exception_message": "cannot identify image file"}
            await tell(client, "execution_error", prompt_id=number, **about)
            return
        for step in range(painter["steps"]):
            await tell(client, "progress", value=step + 1, max=painter["steps"], prompt_id=number, node="1")
            if client in sockets and previews:
                await sockets[client].send_bytes(b"\0\0\0\1\0\0\0\1" + preview(step + 1))
            await asyncio.sleep(0)
        if trick == "!hang":
            await interrupted.wait()
            interrupted.clear()
            print("interrupted:", number, flush=True)
            await tell(client, "execution_interrupted", prompt_id=number)
            return
        colour = painter["seed"].to_bytes(8, "little")[:3]
        pictures = []
        for _ in range(painter["batch_size"]):
            made += 1
            name = f"{nodes['2']['inputs']['filename_prefix']}_{made:05}_.png"
            Path(said("--output-directory"), name).write_bytes(
                png(painter["width"], painter["height"], colour * painter["width"])
            )
            pictures.append({"filename": name, "subfolder": "", "type": "output"})
        await tell(client, "execution_success", prompt_id=number)
        await asyncio.sleep(0.05)  # as there: the history is written after that
        history[number] = {"outputs": {"2": {"images": pictures}}}
        await tell(client, "executing", node=None, prompt_id=number)

    async def draw_all() -> None:
        while True:
            number, client, nodes = await queue.get()
            if number in deleted:
                continue
            running.append(number)
            await draw(number, client, nodes)
            running.remove(number)

    async def upload(request: Request) -> Response:
        form = await request.form()
        file = form["image"]
        assert isinstance(file, UploadFile)
        assert file.filename is not None
        Path(said("--input-directory"), file.filename).write_bytes(await file.read())
        return JSONResponse({"name": file.filename, "subfolder": "", "type": "input"})

    async def view(request: Request) -> Response:
        query = {key: values[0] for key, values in parse_qs(urlsplit(str(request.url)).query).items()}
        path = Path(said(f"--{query['type']}-directory"), query["filename"])
        if not path.exists():
            return Response(status_code=404)
        if "preview" in query:
            return Response(f"{query['preview']} of {query['filename']}".encode())
        return Response(path.read_bytes(), media_type="image/png")

    async def change_queue(request: Request) -> Response:
        deleted.update((await request.json()).get("delete", []))
        return Response()

    async def interrupt(request: Request) -> Response:
        number = (await request.json()).get("prompt_id")
        if number is None or number in running:
            interrupted.set()
        return Response()

    async def told(request: Request) -> Response:
        number = request.path_params["number"]
        return JSONResponse({number: history[number]} if number in history else {})

    async def forget(request: Request) -> Response:
        for number in (await request.json()).get("delete", []):
            history.pop(number, None)
        return Response()

    async def nodes(_request: Request) -> Response:
        return JSONResponse({name: {"input": {"required": takes}} for name, takes in TAKES.items()})

    async def stats(_request: Request) -> Response:
        return JSONResponse({"system": {"comfyui_version": "0.3.64"}})

    app = Starlette(
        routes=[
            WebSocketRoute("/ws", ws),
            Route("/prompt", prompt, methods=["POST"]),
            Route("/upload/image", upload, methods=["POST"]),
            Route("/view", view),
            Route("/queue", change_queue, methods=["POST"]),
            Route("/interrupt", interrupt, methods=["POST"]),
            Route("/history/{number}", told),
            Route("/history", forget, methods=["POST"]),
            Route("/object_info", nodes),
            Route("/system_stats", stats),
        ]
    )

    async def serve() -> None:
        config = uvicorn.Config(
            app, host=said("--listen"), port=int(said("--port")), log_level="warning", ws="websockets-sansio"
        )
        async with asyncio.TaskGroup() as group:
            drawing = group.create_task(draw_all())
            await uvicorn.Server(config).serve()
            drawing.cancel()

    asyncio.run(serve())
    return 0
