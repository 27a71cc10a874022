"""Ranks for all tests: real processes that meet over gloo on this machine."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.forks import Children, Ended, Forks


class Ranks:
    """Starts ranks, as children of one server."""

    def __init__(self, forks: Forks):
        self.forks = forks

    def start(self, size: int, job: str, limit: float = 60.0, **arguments: Any) -> Children:
        """Let `size` ranks begin a job of `tests.distributed.jobs`."""
        return self.forks.start(job, size, limit, **arguments)

    def run(self, size: int, job: str, code: int | None = 0, **arguments: Any) -> list[Ended]:
        """Run a job on `size` ranks to its end, and check their exit codes (None: any)."""
        ended = self.start(size, job, **arguments).end()
        assert code is None or {rank.code for rank in ended} == {code}, ended
        return ended

    def pkmlm(self, size: int, *words: object, code: int | None = 0) -> list[Ended]:
        """Run a command line on `size` ranks."""
        return self.run(size, "command", code, words=[str(word) for word in words])


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Forks(tmp_path_factory.mktemp("ranks"), "tests.distributed.jobs") as forks:
        forks.run("warm", here=True)
        yield Ranks(forks)
