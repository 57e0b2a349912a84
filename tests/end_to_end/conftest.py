"""One process that has done the imports, for all commands and drills of the session."""

from collections.abc import Iterator

import pytest

from end_to_end.cli_process import Forked


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    forked = Forked()
    yield forked
    forked.close()
