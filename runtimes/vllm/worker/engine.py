"""Makes vLLM's engine available to the threads that answer requests: each gets an iterator of its tokens.

The engine's client lives in the server's event loop. A request's task there reads what the engine generates and puts it into
a queue, which the request's thread reads. When nobody wants more tokens, the task is cancelled, which aborts the request in
the engine. If the engine itself ends, nothing can be answered any more, and the program ends with it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import secrets
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from runtimes.sdk.chat.request import Sampling
from runtimes.sdk.chat.tokens import Ending, Reused, Token
from runtimes.sdk.chat.worker import Prompt as TextPrompt
from runtimes.sdk.chat.worker import Run
from runtimes.sdk.errors import WorkerError

T = TypeVar("T")
GRAMMARS: Final = "guidance"  # the backend that reads llguidance's grammars
LEAST_TOP_P: Final = 1e-6  # vLLM wants more than 0
POLL_S: Final = 0.05  # interval at which a thread that waits for a token checks its client

Result = Token | Ending | Reused
Results = queue.SimpleQueue[Result | Exception]


@dataclass(frozen=True, slots=True)
class Prompt(TextPrompt):
    """A prompt in vLLM's form. `inputs`: its tokens and pictures, as the engine takes them.

    `grammar`: the grammar of the answer, in llguidance's Lark; None: any text.
    """

    inputs: Any = field(default=None, repr=False)
    grammar: str | None = None


class Engine:
    """The engine. `start` blocks until the model is loaded. Call all other methods from any thread except the loop's."""

    client: AsyncLLM

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def start(self, settings: Mapping[str, Any], words: Sequence[str] = ()) -> None:
        """Load the model. `settings` are engine arguments, `words` further ones as on a command line.

        Raises whatever vLLM raises, and SystemExit for a word that it doesn't know.
        """
        self.client = AsyncLLM.from_engine_args(_arguments(settings, words))

    def close(self) -> None:
        """End the engine's processes, if there are any."""
        if hasattr(self, "client"):
            self.client.shutdown()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and return its result. Raises whatever the coroutine raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def prepare(self, prompt: Mapping[str, Any], param: str) -> Any:
        """The prompt in the engine's form, with places for pictures among the tokens. Raises WorkerError."""
        try:
            (prepared,) = await self.client.renderer.render_cmpl_async([dict(prompt)])
        except (VLLMClientError, ValueError) as error:
            raise _refusal(error, param) from error
        return prepared

    async def try_out(self) -> None:
        """Generate a token, and watch the engine from now on."""
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = await self.prepare({"prompt_token_ids": [0]}, "prompt")
        async for _ in self.client.generate(prompt, params, _random_id()):
            pass
        assert self.client.output_handler is not None, "it was started by the request"
        self.client.output_handler.add_done_callback(self._exit_with_engine)

    def generate(self, run: Run[Prompt], ends: frozenset[int]) -> Iterator[Result]:
        """Yields tokens as they come, then the reason of the end; stops once nobody wants more. Raises WorkerError."""
        results: Results = queue.SimpleQueue()
        params = parameters(run.request.sampling, run.limit, ends, run.prompt.grammar)
        task = asyncio.run_coroutine_threadsafe(self._read_output(run.prompt.inputs, params, results), self._loop)
        return _iterate_results(run, results, task.cancel)

    async def _read_output(self, inputs: Any, params: SamplingParams, results: Results) -> None:
        has_begun = False
        try:
            async for output in self.client.generate(inputs, params, _random_id()):
                if not has_begun:
                    results.put(Reused(output.num_cached_tokens or 0))
                    has_begun = True
                (completion,) = output.outputs
                for token in _new_tokens(completion, params.logprobs):
                    results.put(token)
                if completion.finish_reason is not None:
                    results.put("length" if completion.finish_reason == "length" else "stop")
        except EngineDeadError:
            pass  # the program ends, and all connections with it
        except (VLLMClientError, ValueError) as error:
            results.put(_refusal(error, None))
        except Exception as error:  # noqa: BLE001  # the thread raises it
            results.put(error)

    def _exit_with_engine(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():  # as it is when this program ends
            sys.stderr.write("exiting: the engine of vLLM has ended\n")
            sys.stderr.flush()
            os._exit(1)


def _arguments(settings: Mapping[str, Any], words: Sequence[str]) -> AsyncEngineArgs:
    """The engine's arguments; the settings count more than the words."""
    own = {**settings, "structured_outputs_config": StructuredOutputsConfig(backend=GRAMMARS)}
    if not words:
        return AsyncEngineArgs(**own)
    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="extra_args")).parse_args([*words])
    vars(parsed).update(own)
    return AsyncEngineArgs.from_cli_args(parsed)


def parameters(sampling: Sampling, limit: int, ends: frozenset[int], grammar: str | None) -> SamplingParams:
    """The parameters of a request in vLLM's form."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=max(sampling.top_p, LEAST_TOP_P),
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        max_tokens=limit,
        stop_token_ids=sorted(ends),
        structured_outputs=None if grammar is None else StructuredOutputsParams(grammar=grammar),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _iterate_results(run: Run[Prompt], results: Results, cancel: Any) -> Iterator[Result]:
    try:
        while not run.unwanted:
            try:
                item = results.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(item, Exception):
                raise item
            yield item
            if isinstance(item, str):
                return
    finally:
        cancel()


def _new_tokens(completion: CompletionOutput, alternatives: int | None) -> Iterator[Token]:
    """The new tokens, each with its log probability and those of the likeliest alternatives, likeliest first."""
    described = completion.logprobs or [None] * len(completion.token_ids)
    for number, found in zip(completion.token_ids, described, strict=True):
        if found is None:
            yield Token(number)
            continue
        ranked = sorted(found.items(), key=lambda item: -item[1].logprob)[: alternatives or 0]
        yield Token(number, found[number].logprob, tuple((other, value.logprob) for other, value in ranked))


def _refusal(error: Exception, param: str | None) -> WorkerError:
    return WorkerError(f"vLLM refuses this request: {error}", param=param)


def _random_id() -> str:
    return secrets.token_hex(8)
