"""Prepares requests whose params take long to process, such as a large grammar.

A thread prepares them, so that no engine step waits; then the request goes to the loop. Other
messages pass at once and in order, and messages about a waiting request wait with it. A request
with invalid params is refused here and never reaches the loop. Knows no grammars; a `Preparation`
does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from headway.engine.messages import Query, Refusal, Submit, ToLoop, refusal_of
from headway.errors import ExecutorError, RequestError
from headway.executor.base import Preparation

Post = Callable[[list[ToLoop]], None]
Refuse = Callable[[Refusal], None]
log = logging.getLogger(__name__)


class PreparationQueue:
    """Passes messages to a loop. `send` must be called by one thread at a time.

    `refuse` is called on the thread that prepares params, or after `close` on that of `send`.
    """

    def __init__(self, post: Post, preparation: Preparation, refuse: Refuse) -> None:
        self._post, self._preparation, self._refuse = post, preparation, refuse
        # By id of a waiting request: later messages about it.
        self._held: dict[str, list[ToLoop]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        # One thread, so that preparation takes at most one core from the engine.
        self._thread = ThreadPoolExecutor(1, "preparation_queue")

    def send(self, messages: list[ToLoop]) -> None:
        """Pass messages on; requests that are not ready are prepared first."""
        ready = [passed for each in messages if (passed := self._passed(each)) is not None]
        if ready:
            self._post(ready)

    def close(self) -> None:
        """Prepare nothing more; waiting requests are dropped, later ones are refused."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _passed(self, message: ToLoop) -> ToLoop | None:
        """The message to pass on; None if it has to wait here."""
        if isinstance(message, Submit):
            params = self._preparation.ready(message.params)
            if params is not None:
                return message if params is message.params else replace(message, params=params)
            if self._is_closed:
                self._refuse(refusal_of(message.id, ExecutorError("the engine has been closed")))
                return None
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
        try:
            message = replace(message, params=self._preparation.make_ready(message.params))
        except RequestError as error:
            with self._lock:
                del self._held[message.id]  # a later Cancel is dropped: the request has ended
            self._refuse(refusal_of(message.id, error))
            return
        except Exception as error:  # the executor raises it again and fails the request
            log.debug("request %r could not be prepared: %s", message.id, error)
        with self._lock:  # post under the lock, so that later messages come after these
            self._post([message, *self._held.pop(message.id)])
