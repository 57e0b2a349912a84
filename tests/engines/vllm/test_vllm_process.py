"""Starts, restarts and failures of an engine."""

import copy
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from vllm_bench import Bench, prompts, settings_for

from ppoctl.core.errors import EnvironmentProblemError, OutOfMemoryError, PpoctlError, RecipeError, WeightSyncError
from ppoctl.core.ports import SamplingParams
from ppoctl.engines.vllm.generator import VllmGenerator
from ppoctl.engines.vllm.vllm_start import generation_error, start_error
from ppoctl.engines.weights.sync import EngineSide
from vllm_in_process import Here

pytestmark = pytest.mark.engines

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=8)


def test_bfloat16_engine_is_exact_and_leaves_threads_and_temporary_folder_alone(
    model_folder: Callable[[str], Path], tied: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied.generate(prompts(2), SAMPLING)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bench = Bench.start(model_folder("untied"), dtype="bfloat16")
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    bench.trainer.move(0.01)
    assert len(bench.generate(prompts(10), SAMPLING)) == 10
    assert (torch.get_num_threads(), torch.set_num_threads) == (threads, set_threads)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []
    bench.generator.close()
    bench.generator.close()
    assert len(tied.generate(prompts(2), SAMPLING)) == 2


def test_engine_restarted_on_export_has_its_weights(untied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with untied.host.replacing("takes_weights", lambda engine: False):
        untied.trainer.move(0.05)
        assert untied.worst_gap(prompts(4), SAMPLING) < 1e-3
        # One small step behind: a comparison of log-probs cannot detect it.
        older = copy.deepcopy(untied.trainer.model)
        untied.trainer.move(1e-6)
        monkeypatch.setattr(untied.trainer, "save", older.save_pretrained)
        with pytest.raises(WeightSyncError, match=r"weight `.*` was sent as float32.* but the engine holds float32"):
            untied.generate(prompts(1), SAMPLING)
        monkeypatch.undo()
    untied.trainer.move(0.05)
    assert untied.worst_gap(prompts(4), SAMPLING) < 1e-3


def test_folder_without_model_raises_environment_problem(tmp_path: Path, tied: Bench) -> None:
    trainer, others = tied.trainer, psutil.Process().children(recursive=True)
    settings = settings_for(tmp_path)
    generator = VllmGenerator(settings, trainer.at, EngineSide([Here(settings)], list), print)
    with pytest.raises(EnvironmentProblemError, match="vLLM could not start"):
        generator.prepare(trainer.state)
    generator.close()
    assert psutil.Process().children(recursive=True) == others
    assert len(tied.generate(prompts(2), SAMPLING)) == 2


@pytest.mark.parametrize(
    ("text", "kind", "hint"),
    [
        ("max seq len (9) is larger than the KV cache", OutOfMemoryError, "kv_cache_mib` \\(now 64"),
        ("Free memory on device cuda:0 (20/80 GiB) on startup is less than", OutOfMemoryError, "gpu_memory_frac"),
        ("No available memory for the cache blocks. Try increasing", OutOfMemoryError, "kv_cache_mib` \\(now 64"),
        ("Error in memory profiling. Initial free memory 9 GiB", EnvironmentProblemError, "nvidia-smi"),
        ("User-specified max_model_len (9) is greater", RecipeError, "max_new_tokens"),
    ],
)
def test_enginestart_errors_name_setting_to_change(
    tmp_path: Path, text: str, kind: type[PpoctlError], hint: str
) -> None:
    error = start_error(settings_for(tmp_path), ValueError(text))
    assert type(error) is kind
    assert re.search(hint, str(error.hint))


def test_full_gpu_error_names_the_trained_roles(tmp_path: Path) -> None:
    for trained, listed in ((("actor",), '["actor"]'), (("actor", "critic"), '["actor", "critic"]')):
        settings = replace(settings_for(tmp_path), trained=trained)
        error = start_error(settings, ValueError("Free memory on device cuda:0 (20/80 GiB) on startup is less than"))
        assert str(error.hint).endswith(f"or offload the trainers: --set 'cluster.offload={listed}'")


def test_forward_pass_error_names_model_key(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    found = generation_error(settings, RuntimeError("Unsupported CPU attention configuration\nmore"))
    assert isinstance(found, EnvironmentProblemError)
    assert found.message == (
        f"vLLM failed while it computed with `model.path` `{tmp_path}`: RuntimeError: Unsupported CPU attention "
        "configuration"
    )
    full = torch.OutOfMemoryError("CUDA out of memory")
    assert generation_error(settings, full) is full


def test_error_without_message_reports_its_source_line(tmp_path: Path) -> None:
    try:
        assert not tmp_path
    except AssertionError as error:
        bare = AssertionError().with_traceback(error.__traceback__)
    found = start_error(settings_for(tmp_path), bare)
    assert re.search(r"AssertionError: no message, from .*test_vllm_process\.py:\d+$", found.message)
    assert found.exit_code == 3
