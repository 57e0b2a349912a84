"""Bundled configurations have the published size of their model, and replace a model that is not fetched."""

import json
from pathlib import Path

import pytest

from ppoctl.models.bundled_configs import carried_folder, source_of
from ppoctl.models.cost import count_parameters
from ppoctl.models.labels import has_head, labels_of
from ppoctl.models.shape_reader import read_shape, shape_if_known

MODELS = Path(__file__).parents[2] / "recipes" / "models"
SOURCES = json.loads((MODELS / "sources.json").read_text("utf-8"))


@pytest.fixture(autouse=True)
def nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def test_bundled_configs_and_sources_match() -> None:
    assert {folder.name.replace("--", "/", 1) for folder in MODELS.iterdir() if folder.is_dir()} == set(SOURCES)


@pytest.mark.parametrize("model", SOURCES)
def test_bundled_config_has_published_parameter_count(model: str) -> None:
    """The numbers of parameters are exact for verified configurations, else equal to the published digits."""
    folder, about = carried_folder(model), SOURCES[model]
    assert folder is not None
    shape, published = read_shape(folder), about["parameters"]
    counted = count_parameters(shape)
    if has_head(folder):  # a head in place of logits
        counted += len(labels_of(folder)) * shape.hidden_size
        counted -= 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    assert counted == published if about["verified"] else abs(counted / published - 1) < 1e-6


def test_bundled_config_is_used_if_model_is_not_fetched() -> None:
    shape = shape_if_known("Qwen/Qwen2.5-0.5B")
    assert shape is not None
    assert (shape.num_layers, shape.hidden_size) == (24, 896)


def test_fetched_config_takes_precedence_over_bundled(tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--Qwen--Qwen2.5-0.5B"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text("abc", "ascii")
    (cache / "snapshots/abc").mkdir(parents=True)
    config = json.loads((MODELS / "Qwen--Qwen2.5-0.5B/config.json").read_text("utf-8"))
    (cache / "snapshots/abc/config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}), "utf-8")
    shape = shape_if_known("Qwen/Qwen2.5-0.5B")
    assert shape is not None
    assert shape.num_layers == 3


@pytest.mark.parametrize("path", ["Qwen/Qwen9-1B", "nothing", "/some/where/else", "../sources"])
def test_unknown_model_has_no_bundled_config(path: str) -> None:
    assert carried_folder(path) is None
    assert shape_if_known(path) is None


def test_unverified_configs_are_labelled_unverified() -> None:
    words = {model: source_of(MODELS / model.replace("/", "--")) for model in SOURCES}
    assert {model for model, text in words.items() if text.startswith("unverified: ")} == {
        model for model, about in SOURCES.items() if not about["verified"]
    }
