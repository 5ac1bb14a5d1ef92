"""A request with everything the scheduler keeps of it, and the checks a request passes before it is queued."""

from __future__ import annotations

from dataclasses import dataclass

from ftengine.core import Request, Sequence
from ftengine.scheduler.sampler import SamplingState


@dataclass(frozen=True)
class Limits:
    context: int  # tokens, prompt and output together
    max_running: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_waiting: int = 1024


@dataclass(eq=False)
class Job:
    sequence: Sequence
    sampling: SamplingState
    arrival: int  # order of submission, kept through preemption
    length_limit: int  # tokens, prompt and output together
    stop_ids: frozenset[int]
    admitted: bool = False  # at least once; preemption does not undo it

    @property
    def id(self) -> str:
        return self.sequence.request.id

    @property
    def remaining(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.sequence.tokens) - self.sequence.computed


def refusal(request: Request, limits: Limits) -> str | None:
    """Why a request can never be served, in a sentence; None if it can."""
    prompt, sampling, vocabulary = request.prompt, request.sampling, limits.vocab_size
    if not prompt:
        return "the prompt is empty"
    if len(prompt) >= limits.context:
        return f"the prompt has {len(prompt)} tokens, the context holds {limits.context} with the answer"
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        return f"the prompt has a token id outside the vocabulary of {vocabulary}"
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}; it must be at least 1"
    outside = next((token for token in sampling.logit_bias if not 0 <= token < vocabulary), None)
    if outside is not None:
        return f"logit_bias names the token id {outside}, outside the vocabulary of {vocabulary}"
    return None


def make_job(request: Request, limits: Limits, arrival: int) -> Job:
    """max_tokens is cut to what the context leaves."""
    params = request.sampling
    return Job(
        sequence=Sequence(request, list(request.prompt)),
        sampling=SamplingState(params, request.prompt, limits.vocab_size),
        arrival=arrival,
        length_limit=min(len(request.prompt) + params.max_tokens, limits.context),
        stop_ids=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else limits.eos_token_ids),
    )
