"""The worker program for EXL3 models on ExLlamaV3: single turns, several requests in one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from exllamav3 import ComboSampler, Job

from runtimes.exllamav3.worker.generation import Runner, Task
from runtimes.exllamav3.worker.model import Loaded, Options, load, prompt_ids
from runtimes.exllamav3.worker.parameters import CHAT, COMPLETIONS
from runtimes.sdk.body import Body
from runtimes.sdk.chat import messages
from runtimes.sdk.chat.request import Generation, Sampling
from runtimes.sdk.chat.template import ChatTemplate, ends_thinking, no_template
from runtimes.sdk.chat.tokens import Ending, Token
from runtimes.sdk.chat.worker import Conversation, Prompt, Run, TextWorker
from runtimes.sdk.server import Settings, serve
from runtimes.sdk.worker_pool import Cancel


class ExLlamaV3Worker(TextWorker[Prompt]):
    """One model. The pool's threads prepare prompts and read results; the runner generates for all requests."""

    chat_parameters = CHAT
    completion_parameters = COMPLETIONS
    context_key = "cache_size"
    language: Loaded
    runner: Runner

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.options = Options(**settings.options)
        self.context = self.options.context

    def load(self) -> None:
        """Load, and generate one token."""
        self.language = load(self.options)
        self.runner = Runner(self.language.generator)
        source = self.language.template
        self.template = ChatTemplate(source, self.language.special) if source else None
        trial = Run(Prompt([0]), Generation(Sampling(temperature=0), 1, (), False, False), 1, Cancel(), Cancel())
        list(self.generate(trial))

    def prompt(self, conversation: Conversation) -> Prompt:
        """The prompt of one turn, rendered by the chat template."""
        turns = messages.read_messages(self.language, conversation.messages)
        messages.single_turn_text(turns)
        if self.template is None:
            raise no_template()
        rendered = self.template.render(turns, (), conversation.arguments)
        return Prompt(self.language.encode(rendered), ends_thinking(self.language, rendered))

    def prompt_from_tokens(self, tokens: list[int], body: Body) -> Prompt:
        """The prompt is these tokens, unchanged."""
        return Prompt(tokens)

    def generate(self, run: Run[Prompt]) -> Iterable[Token | Ending]:
        """Submit the run to the runner."""
        sampling = run.request.sampling
        job = Job(
            input_ids=prompt_ids(run.prompt.tokens),
            max_new_tokens=run.limit,
            sampler=ComboSampler(**_sampler_arguments(sampling)),
            seed=sampling.seed,
            stop_conditions=sorted(self.language.ends),
            decode_special_tokens=True,
            max_rq_tokens=self.options.max_rq_tokens,
        )
        task = Task(job, lambda: run.unwanted)
        self.runner.submit(task)
        return iter(task.out)


def _sampler_arguments(sampling: Sampling) -> dict[str, Any]:
    return {
        "rep_p": sampling.repetition_penalty,
        "freq_p": sampling.frequency_penalty,
        "pres_p": sampling.presence_penalty,
        "temperature": sampling.temperature,
        "min_p": sampling.min_p,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "logit_bias": dict(sampling.logit_bias),
    }


if __name__ == "__main__":
    serve(ExLlamaV3Worker)
