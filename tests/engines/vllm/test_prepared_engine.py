"""Engines whose process has imported vLLM before the engine is needed."""

import os
import re
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_bench import prompts, settings_for

from ppoctl.core.activity import ACTIVITIES
from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.core.ports import SamplingParams
from ppoctl.engines.child.process import prestarted
from ppoctl.engines.vllm.engine import GenerationRequest
from ppoctl.engines.vllm.own_process import OwnProcess, engine_process, prepared_process

pytestmark = pytest.mark.engines

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=8)


def tokens_of(engine: OwnProcess, folder: str) -> dict[str, tuple[int, ...]]:
    """Return the tokens that this engine generates with the weights in the folder."""
    requests = [GenerationRequest(one.key, one.prompt_tokens, one.seed) for one in prompts(6)]
    tokens: dict[str, tuple[int, ...]] = {}
    with closing(engine):
        engine.folder = folder
        engine.begin("restart", folder).answers()
        while len(tokens) < len(requests):
            [outputs] = engine.begin("advance", [] if tokens else requests, SAMPLING).answers()
            tokens |= {output.id: output.tokens for output in outputs}
    return tokens


def test_prepared_process_imports_vllm_first_and_its_engine_generates_the_same(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = str(model_folder("tied"))
    settings = replace(settings_for(model_folder("tied")), logs=tmp_path)
    prepared, complete = prepared_process(settings, 1), engine_process(replace(settings, logs=None), 1, folder)
    with prestarted(prepared, complete):
        prepared.wait_until_started()
        assert prepared.call("__getattribute__", "_engine") is None
        assert prepared._process is not None
        # The log of an engine that starts on a folder does not show the moment of the import.
        assert "libxgrammar" in Path(f"/proc/{prepared._process.pid}/maps").read_text(), "vLLM's import loads it"
        tokens = [tokens_of(OwnProcess(settings, 1, number), folder) for number in range(2)]
        assert not prepared.is_running, "both were taken, and closed by their users"
        assert not complete.is_running
    assert tokens[0] == tokens[1]
    logs = [(tmp_path / f"vllm-engine-{number}.log").read_text(encoding="utf-8") for number in range(2)]
    for log in logs:
        found = re.search(r"vLLM was imported before, in (\d+\.\d) s, started the engine in \d+\.\d s", log)
        assert found, log
        assert float(found[1]) > 0
    assert [(tmp_path / f"generator-{number}.log").exists() for number in range(2)] == [True, True]


@pytest.mark.parametrize("fate", ["fails", "dies"])
def test_failed_preparation_is_repeated_by_a_process_that_reports_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # this machine does not have this GPU
    settings = replace(settings_for(tmp_path), logs=tmp_path)
    prepared = prepared_process(settings, 1)
    described: list[str] = []
    with prestarted(prepared), ACTIVITIES.notifying(described.append):
        if fate == "dies":
            assert prepared._process is not None
            os.kill(prepared._process.pid, signal.SIGKILL)
        with pytest.raises(EnvironmentProblemError, match="this process was given GPU `0`"):
            OwnProcess(settings, 1).begin("vocab_size")
    assert described == ["starting vLLM"] * 2, "once for each process"
    assert not prepared.is_running
    assert (tmp_path / "generator-0.log").exists()  # only the second process has the folder
