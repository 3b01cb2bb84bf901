"""Where requests wait whose params take long to read, as a large grammar does.

They are read on a thread of its own, so that no step of the engine waits for one; then the request
goes on to the loop. Everything else passes at once, in order; what is said of a request that waits
here waits with it. A request whose params turn out to be wrong is refused here and never comes to
the loop. Knows no grammars: a `Preparation` does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from headway.engine.messages import Query, Refusal, Submit, ToLoop, refusal_of
from headway.errors import RequestError
from headway.executor.base import Preparation

Post = Callable[[list[ToLoop]], None]
Refuse = Callable[[Refusal], None]
log = logging.getLogger(__name__)


class PreparationQueue:
    """Stands before a loop; `send` is called by one thread at a time.

    `refuse` is called on the thread that reads params.
    """

    def __init__(self, post: Post, preparation: Preparation | None, refuse: Refuse) -> None:
        self._post, self._preparation, self._refuse = post, preparation, refuse
        self._held: dict[str, list[ToLoop]] = {}  # by id: a request, and what came after it
        self._lock = threading.Lock()
        # One thread: however much there is to read, it takes one core from the engine at most.
        self._thread = ThreadPoolExecutor(1, "preparation_queue") if preparation else None

    def send(self, messages: list[ToLoop]) -> None:
        """Pass messages on, but for requests that are not ready."""
        if self._preparation is not None:
            messages = [passed for each in messages if (passed := self._passed(each)) is not None]
        if messages:
            self._post(messages)

    def close(self) -> None:
        """Read nothing more; what waits here goes nowhere."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _passed(self, message: ToLoop) -> ToLoop | None:
        """A message that may go on; None if it has to wait here."""
        assert self._preparation is not None and self._thread is not None, "else all may pass"
        if isinstance(message, Submit):
            params = self._preparation.ready(message.params)
            if params is not None:
                return message if params is message.params else replace(message, params=params)
            with self._lock:
                self._held[message.id] = []
            self._thread.submit(self._make_ready, message)
            return None
        if self._held and not isinstance(message, Query):
            with self._lock:
                if message.id in self._held:
                    self._held[message.id].append(message)
                    return None
        return message

    def _make_ready(self, message: Submit) -> None:
        assert self._preparation is not None, "else nothing waits"
        try:
            message = replace(message, params=self._preparation.make_ready(message.params))
        except RequestError as error:
            with self._lock:
                del self._held[message.id]  # a cancellation of it, at most: it has ended
            self._refuse(refusal_of(message.id, error))
            return
        except Exception as error:  # the executor meets it again, and ends the request with it
            log.debug("request %r could not be made ready: %s", message.id, error)
        with self._lock:  # posted under it: what comes now must come after
            self._post([message, *self._held.pop(message.id)])
