"""Runs the submissions of one HTTP request together, even if the queue does not hold all of them.

A submission is a function that returns an iterator. The iterator submits a request to the engine
and yields what the request gains. Knows nothing of prompts and what they gain.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TypeVar

from headway.engine.async_engine import AsyncEngine
from headway.errors import Overloaded

AT_ONCE = 32  # requests to make or submit before other streams get a turn
Gain = TypeVar("Gain")
Submission = Callable[[], AsyncIterator[Gain]]


async def merge_submissions(
    engine: AsyncEngine, submissions: Sequence[Submission[Gain]]
) -> AsyncGenerator[Gain, None]:
    """Start all submissions at once and yield what they gain. The first that fails ends them all.

    A submission that finds the queue full is started again when another one has ended, so more
    submissions than the queue holds still run. If all of them find it full, Overloaded is raised.
    """
    queue: asyncio.Queue[tuple[int, Gain | Exception | None]] = asyncio.Queue()  # None: ended
    tasks: dict[int, asyncio.Task[None]] = {}
    num_open, parked, is_admitted = len(submissions), deque[int](), False
    try:
        for number, submission in enumerate(submissions):
            tasks[number] = asyncio.create_task(_pump(number, submission, queue))
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)  # let other streams proceed
        while num_open:
            number, gained = await queue.get()
            can_wait = not engine.is_closing and (num_open > 1 or is_admitted)
            if isinstance(gained, Overloaded) and can_wait:
                parked.append(number)
                if num_open > 1:
                    num_open -= 1
                    continue
                await asyncio.sleep(gained.retry_after)  # only other requests can free the queue
            elif isinstance(gained, Exception):
                raise gained
            elif gained is not None:
                is_admitted = True
                yield gained
                continue
            if parked:
                number = parked.popleft()
                tasks[number] = asyncio.create_task(_pump(number, submissions[number], queue))
            else:
                num_open -= 1
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _pump(
    number: int,
    submission: Submission[Gain],
    queue: asyncio.Queue[tuple[int, Gain | Exception | None]],
) -> None:
    try:
        async for gained in submission():
            queue.put_nowait((number, gained))
        queue.put_nowait((number, None))
    except Exception as error:
        queue.put_nowait((number, error))
