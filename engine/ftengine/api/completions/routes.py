"""POST /v1/completions: text in, text out, no template."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ftengine.api import respond
from ftengine.api.body import read
from ftengine.api.collect import Collected
from ftengine.api.completions.encode import CompletionStream, whole
from ftengine.api.completions.request import DEFAULT_TOKENS, CompletionRequest, prompts
from ftengine.api.front import Front
from ftengine.api.generate import Job
from ftengine.api.sessions import openai_caller


def routes(front: Front) -> list[Route]:
    limits, model = front.settings.limits, front.settings.served_name

    async def text_completions(request: Request) -> Response:
        body = await read(request, CompletionRequest, limits)
        front.check_model(body.model)
        given, count = prompts(body, limits), body.n or 1
        front.check_choices(len(given) * count, "n")
        stops = front.stops(body.stop, "stop")
        caller = openai_caller(request.headers, body.prompt_cache_key, body.user)
        jobs = [
            Job(
                source=prompt,
                sampling=body,
                caller=caller,
                max_tokens=body.max_tokens or DEFAULT_TOKENS,
                stops=stops,
                logprobs=body.logprobs,
                choice=choice,
            )
            for prompt in given
            for choice in range(count)
        ]
        call, token_text = front.call("completions", request), front.generator.token_text
        echoes = [
            await front.generator.plain_text(prompt) if body.echo else "" for prompt in given for _ in range(count)
        ]
        if body.stream:
            encoder = CompletionStream(
                model,
                echoes,
                answers_per_prompt=count,
                include_usage=bool(body.stream_options and body.stream_options.include_usage),
                token_text=token_text,
            )
            return await respond.stream(request, front, call, jobs, encoder)

        def build(answers: list[Collected]) -> dict[str, Any]:
            return whole(
                answers,
                model,
                echoes,
                answers_per_prompt=count,
                token_text=token_text,
                logprobs=body.logprobs is not None,
            )

        return await respond.collect(request, front, call, jobs, build)

    return [Route("/v1/completions", text_completions, methods=["POST"])]
