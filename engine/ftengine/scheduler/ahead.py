"""When the step after the one that computes may be launched already.

From a step's end to the next one's start the host takes its tokens, plans, and launches: about 0.2 ms in which a GPU
has nothing to do. A decode step whose sequences all go on needs of the step before only the tokens, and those lie on
the device: it can be queued behind that step and take them there. What holds then:

- At most two steps are under way: the one that is waited for and one ahead of it. Plans, preemption and prefill happen
  with none ahead, so a step ahead computes the same sequences in the same order, one token further each.
- A sequence may end with the first of the two, by a stop token or a cancellation. Its client hears of it at once; its
  pages and its state stay until the step ahead has ended: that computed its last token, so the state is kept as it is.
- After a fault its row of the step ahead is discarded: that wrote one position behind its tokens, in a page of its own
  that is not in the prefix tree, and its state slot. Both are free at once, because whatever is launched or copied into
  them later comes later in the stream.
- An anchor in the middle of an answer is copied from the state, so no step is launched ahead of the end of the one
  after which that is due.
- The host changes no row of logits and draws no token itself. Where the device has to leave a token to the host after
  all (WIDE), the step ahead went on with another token: its row is discarded, its random number taken back, and the
  sequence begins anew from the prefix cache. That happens once a request: it is never launched ahead again. If the
  host's token ends the answer, its recurrent state is given up, for the step ahead is changing it.

Admission goes on meanwhile: what it copies comes later in the stream, what it admits prefills in the step after.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ftengine.core import SequenceStatus
from ftengine.models.base import LaunchingAhead, Model
from ftengine.scheduler.batch import Work
from ftengine.scheduler.jobs import Job
from ftengine.scheduler.scheduler import Scheduler
from ftengine.scheduler.step import Step

if TYPE_CHECKING:
    from ftengine.scheduler.device_sampler import DeviceSampler


def launching_ahead(model: Model) -> LaunchingAhead | None:
    """None where the model cannot, or FT_AHEAD=0 forbids it."""
    return model if isinstance(model, LaunchingAhead) and os.environ.get("FT_AHEAD") != "0" else None


def work_ahead(step: Step, scheduler: Scheduler, sampler: DeviceSampler, rows: int) -> list[Work]:
    """The step after `step`, with pages for its tokens; nothing if it has to wait for that one's end.

    rows: the most that the model launches ahead.
    """
    running = scheduler.computing
    alone = step.drawn is not None and not isinstance(step.pending, Exception) and not step.discarded | step.parting
    if not alone or len(running) > rows or [item.sequence for item in step.work] != [job.sequence for job in running]:
        return []
    if not all(_goes_on(job, scheduler) and sampler.alone(job.sampling) for job in running):
        return []
    if not scheduler.reserve_ahead(running):
        return []
    return [Work(job.sequence, 1, ahead=1) for job in running]


def _goes_on(job: Job, scheduler: Scheduler) -> bool:
    """Unless its next token is a stop token."""
    sequence, cache = job.sequence, scheduler.cache
    decodes = sequence.status is SequenceStatus.DECODE and sequence.computed + 1 == len(sequence.tokens)
    return decodes and not cache.keeps_next(sequence) and len(sequence.tokens) + 1 < job.length_limit
