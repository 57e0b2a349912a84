"""An engine's process groups, in a process that has none: forked, because the test's own may hold engines."""

import sys
from pathlib import Path

import pytest

from story.typed import TESTS, Forked

sys.path.append(str(TESTS / "engines" / "vllm"))
from vllm_bench import write_model

pytestmark = pytest.mark.engines


def test_groups_of_the_trainer_survive_an_engine_and_none_of_its_own_do(tmp_path: Path, forked: Forked) -> None:
    write_model(tmp_path / "model", tied=True)
    with (tmp_path / "out").open("w") as out, (tmp_path / "log").open("w") as log:
        code = forked.wait(forked.start(TESTS, ["story.engine_alone", str(tmp_path / "model")], out, log))
    assert code == 0, (tmp_path / "log").read_text()[-4000:]
    assert (tmp_path / "out").read_text() == "left clean\n"
