"""Every invalid model is reported in one sentence before anything starts."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppoctl.cli.app import run
from ppoctl.core.errors import RecipeError
from ppoctl.core.finding import note
from ppoctl.models.folder import fetched
from ppoctl.recipe.generator_limits import require_head_size
from ppoctl.recipe.loading.load import load
from ppoctl.start.preflight.check import check
from ppoctl.start.preflight.model_checks import find_model
from preflight.conftest import edit, edit_header

Break = Callable[[Path], None]


def config(**changes: Any) -> Break:
    return lambda base: edit(base / "config.json", **changes)


def header(change: Callable[[dict[str, Any]], None]) -> Break:
    return lambda base: edit_header(base / "model.safetensors", change)


def text(name: str, content: str | bytes) -> Break:
    def write(base: Path) -> None:
        (base / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def cut(base: Path) -> None:
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def index(base: Path) -> None:
    whole = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(whole), "utf-8")


def two_sets(base: Path) -> None:
    shutil.copyfile(base / "model.safetensors", base / "part.safetensors")
    part = dict.fromkeys(header_of(base / "part.safetensors"), "part.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": part}), "utf-8")


def pickled(base: Path) -> None:
    (base / "model.safetensors").rename(base / "pytorch_model.bin")


def no_end(base: Path) -> None:
    edit(base / "config.json", eos_token_id=...)
    edit(base / "generation_config.json", eos_token_id=...)


def own_head(base: Path) -> None:
    """Add an output layer that differs from the embedding, although config.json ties them."""
    file = base / "model.safetensors"
    end = max(entry["data_offsets"][1] for entry in header_of(file).values())
    entry = {"dtype": "F32", "shape": [576, 128], "data_offsets": [end, end + 576 * 128 * 4]}
    edit_header(file, lambda found: found.update({"lm_head.weight": entry}))
    with file.open("ab") as opened:
        opened.write(b"\1" * 576 * 128 * 4)


def header_of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    edit_header(file, found.update)
    return {name: entry for name, entry in found.items() if name != "__metadata__"}


def rope(**parameters: Any) -> Break:
    return config(rope_parameters={"rope_theta": 1e4, **parameters})


NORM = "model.norm.weight"
WRONG: dict[str, tuple[Break, int, str]] = {
    "no family of ours": (config(model_type="gpt2"), 2, "model family `gpt2` is not supported"),
    "no family at all": (config(model_type=...), 2, "model family `None` is not supported"),
    "broken config": (text("config.json", "{bad"), 3, "config.json` is not JSON: line 1, column 2: Expecting"),
    "config of no object": (text("config.json", "[1]"), 3, "config.json` is JSON, but not an object"),
    "config in Latin-1": (text("config.json", b'{"a": "\xe9"}'), 3, "config.json` is not UTF-8 text"),
    "another activation": (config(hidden_act="gelu"), 2, "`hidden_act = gelu` is not supported for `qwen2`"),
    "a field nobody knows": (config(surprise=1), 2, "`surprise = 1` is not supported for `qwen2`"),
    "a window": (config(use_sliding_window=True), 2, "`use_sliding_window = True` is not supported"),
    "dynamic RoPE": (rope(rope_type="dynamic", factor=2.0), 2, "'dynamic', 'factor': 2.0}}` is not supported"),
    "RoPE of no kind": (rope(rope_type="foo"), 2, "'rope_type': 'foo'}}` is not supported"),
    "a RoPE base in words": (
        rope(rope_theta="1e4"),
        3,
        "`rope_parameters.rope_theta = 1e4` must be a number above 0",
    ),
    "a count in words": (config(num_hidden_layers="4"), 3, "`num_hidden_layers = 4` must be a whole number above 0"),
    "no layers": (config(num_hidden_layers=0), 3, "`num_hidden_layers = 0` must be a whole number above 0"),
    "too few kinds": (config(num_hidden_layers=3), 3, "`layer_types` has 4 entries, but `num_hidden_layers` is 3"),
    "uneven heads": (config(num_key_value_heads=3), 2, "`num_key_value_heads = 3`, `num_attention_heads = 4` is not"),
    "odd heads": (config(head_dim=33), 2, "`head_dim = 33`, `hidden_size = 128`, `num_attention_heads = 4` is not"),
    "more layers than weights": (
        config(num_hidden_layers=5, layer_types=...),
        3,
        "tensor `model.layers.4.input_layernorm.weight` and 11 more missing from",
    ),
    "fewer layers than weights": (
        config(num_hidden_layers=3, layer_types=...),
        3,
        "tensor `model.layers.3.input_layernorm.weight` in `{base}` is not part of the actor",
    ),
    "another vocabulary": (
        config(vocab_size=640),
        3,
        "tensor `model.embed_tokens.weight` in `{base}` has shape [576, 128]; config.json implies [640, 128]",
    ),
    "a tokenizer too large": (
        config(vocab_size=570),
        3,
        "has tokens up to 575, but the model's vocabulary ends at 569",
    ),
    "a norm of bytes": (
        header(lambda found: found[NORM].update(dtype="I8", shape=[512])),
        3,
        f"tensor `{NORM}` in `{{base}}` has shape [512]; config.json implies [128]",
    ),
    "eight bits": (
        header(lambda found: found[NORM].update(dtype="I32")),
        3,
        f"tensor `{NORM}` in `{{base}}` is I32; quantized models cannot be trained",
    ),
    "a shape without its bytes": (
        header(lambda found: found[NORM].update(shape=[127])),
        3,
        f"model.safetensors` cannot be read: tensor `{NORM}` of F32 and shape [127] is at bytes ",
    ),
    "a shape of negative numbers": (
        header(lambda found: found[NORM].update(shape=[-1, -128])),
        3,
        f"model.safetensors` cannot be read: tensor `{NORM}` of F32 and shape [-1, -128] is at bytes ",
    ),
    "a shape in fractions": (
        header(lambda found: found[NORM].update(shape=[128.0])),
        3,
        f"model.safetensors` cannot be read: tensor `{NORM}` of F32 and shape [128.0] is at bytes ",
    ),
    "a list of dtypes": (
        header(lambda found: found[NORM].update(dtype=["F32"])),
        3,
        f"model.safetensors` cannot be read: tensor `{NORM}` of ['F32'] and shape [128] is at bytes ",
    ),
    "a tensor twice as far": (
        header(lambda found: found[NORM].update(data_offsets=[8, 520])),
        3,
        "model.safetensors` cannot be read: its tensors cover it up to byte ",
    ),
    "cut short": (
        cut,
        3,
        "model.safetensors` cannot be read: its tensors cover it up to byte 3,454,584 of 3,453,584",
    ),
    "no header": (text("model.safetensors", b"\xff" * 100), 3, "model.safetensors` cannot be read: "),
    "empty": (text("model.safetensors", b""), 3, "model.safetensors` cannot be read: Expecting value"),
    "an index of something else": (index, 3, "of `{base}` is in a file but not in the index"),
    "two sets of weights": (
        two_sets,
        3,
        "`{base}` has two sets of weights: `model.safetensors`, which transformers reads, and the files that "
        "`model.safetensors.index.json` names, such as `part.safetensors`",
    ),
    "an index of nothing": (
        text("model.safetensors.index.json", '{"weight_map": {}}'),
        3,
        "model.safetensors.index.json` cannot be read: it has no table `weight_map` of tensors and files: it is ",
    ),
    "pickles": (pickled, 3, "the weights in `{base}` are pickles (`pytorch_model.bin`)"),
    "an output layer of its own": (
        own_head,
        3,
        "`lm_head.weight` in `{base}` differs from `model.embed_tokens.weight`",
    ),
    "no end": (no_end, 3, "model folder `{base}` names no end-of-sequence token"),
    "an end that is no token": (
        lambda base: edit(base / "generation_config.json", eos_token_id=576),
        3,
        "`eos_token_id = 576` of `{base}` is not in the vocabulary of 576 tokens",
    ),
    "a broken tokenizer": (text("tokenizer.json", "{"), 3, "tokenizer.json` is not JSON: line 1, column 2"),
    "no tokenizer in it": (
        text("tokenizer.json", "{}"),
        3,
        "tokenizer.json` is not a tokenizer: it has no vocabulary",
    ),
    "a token that only the configuration has": (
        lambda base: edit(base / "tokenizer_config.json", added_tokens_decoder={"576": {"content": "<|turn|>"}}),
        3,
        "`{base}/tokenizer_config.json` has tokens up to 576, but the model's vocabulary ends at 575",
    ),
    "a token without an id": (
        lambda base: edit(base / "tokenizer_config.json", pad_token="<|none|>"),
        3,
        "`{base}/tokenizer_config.json` has tokens up to 576, but the model's vocabulary ends at 575",
    ),
    "tokens of an earlier version": (
        text("added_tokens.json", '{"<|turn|>": 576}'),
        3,
        "`{base}/added_tokens.json` has tokens up to 576, but the model's vocabulary ends at 575",
    ),
    "a broken template": (
        text("chat_template.jinja", "\n{% if"),
        3,
        "the chat template of `{base}` is not valid jinja: unexpected 'end of template' (line 2)",
    ),
    "a template without questions": (
        text("chat_template.jinja", "hello"),
        3,
        "the model's chat template omits the question of row `train/000000-",
    ),
    "a template that fails": (
        text("chat_template.jinja", "{{ messages[0]['content'] + 1 }}"),
        4,
        "the model's chat template rejects row `train/000000-",
    ),
    "a window too long": (
        config(max_position_embeddings=32),
        2,
        "rollout.max_new_tokens: a window of 33 tokens (`rollout.max_prompt_tokens` `20` + `rollout.max_new_tokens` "
        "`13`) does not fit the model's 32 positions",
    ),
}


@pytest.fixture
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the import of engines fail, so that an undetected problem cannot start them."""
    monkeypatch.setitem(sys.modules, "ppoctl.run.wire", None)


def test_intact_model_and_rows_have_no_problems(folder: Path) -> None:
    found = check(load([Path("r.toml")]).recipe, device="cpu")
    assert found == []


@pytest.mark.parametrize("case", WRONG)
def test_wrong_model_is_reported_in_one_sentence(folder: Path, case: str) -> None:
    damage, code, says = WRONG[case]
    damage(folder / "base")
    problems = check(load([Path("r.toml")]).recipe, lambda path: ".".join(path), device="cpu")
    wanted = says.format(base=folder / "base", here=folder)
    [found] = [problem for problem in problems if wanted in f"{problem.where}: {problem.what}"]
    assert found.error.exit_code == code
    assert found.hint


@pytest.mark.parametrize("command", ["validate", "plan", "train", "rollout"])
@pytest.mark.usefixtures("_nothing_starts")
def test_every_command_reports_model_problem_first(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    edit(folder / "base/config.json", hidden_act="gelu")
    assert run([command, "r.toml"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: r.toml:4: `hidden_act = gelu` is not supported for `qwen2` (config.json of `{folder}/base`)",
        "",
        "hint: choose another model; editing this field would change what the model computes",
    ]
    assert not (folder / "runs").exists()


def test_all_problems_are_reported_together(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut(folder / "base")
    (folder / "base/tokenizer.json").write_text("{", "utf-8")
    (folder / "train.jsonl").write_text("\n", "utf-8")
    assert run(["validate", "r.toml", "--set", "steps=0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    wanted = ("steps", "cannot be read", "is not JSON", "has no rows")
    assert [word in line for line, word in zip(lines, wanted, strict=False)] == [True] * 4


def test_stop_that_no_response_contains_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "r.toml", "--set", "rollout.stop_token_ids=[3, 576]"]) == 2
    err = capsys.readouterr().err
    assert "error: --set: `rollout.stop_token_ids` contains id 576, but the vocabulary of `" in err
    assert "hint: --set 'rollout.stop_token_ids=[3]'" in err
    special = ["--set", 'rollout.stop_strings=["x", "<|user|>:"]', "--set", "rollout.special_tokens=drop"]
    assert run(["validate", "r.toml", *special]) == 2
    assert "without `<|user|>`, the text never contains it, so it ends no response" in capsys.readouterr().err
    assert run(["validate", "r.toml", *special[:2]]) == 0


def test_supported_head_sizes_depend_on_device() -> None:
    require_head_size(48, "m", "cpu")
    require_head_size(16, "m", "gpu")
    with pytest.raises(RecipeError) as caught:
        require_head_size(16, "m", "cpu")
    assert caught.value.message == (
        "`model.path` is `m`, which has a head size (`head_dim`) of 16; vLLM on a CPU supports 32, 48, 64, 80, 96, "
        "112, 128, 160, 192, 224, 256, 512"
    )


def test_head_size_of_model_is_checked(folder: Path) -> None:
    edit(folder / "base/config.json", head_dim=16)
    says = [problem.what for problem in check(load([Path("r.toml")]).recipe, device="cpu", rows=False)]
    assert sum("head size (`head_dim`) of 16" in text for text in says) == 1
    says = [problem.what for problem in check(load([Path("r.toml")]).recipe, device="gpu", rows=False)]
    assert not any("head size" in text for text in says)


def test_missing_chat_template_is_noted(folder: Path) -> None:
    (folder / "base/chat_template.jinja").unlink()
    text = f"the model in `{folder}/base` has no chat template: prompts are plain text"
    assert check(load([Path("r.toml")]).recipe) == [note(text, kind="model")]


@pytest.mark.parametrize(
    ("path", "code", "says"),
    [
        ("./no", 3, "`model.path` is `{here}/no`: no such folder"),
        pytest.param("/no/such", 3, "`model.path` is `/no/such`: no such folder", marks=pytest.mark.ci("./no")),
        (
            "gpt2",
            3,
            "`model.path` is `{here}/gpt2`: no such folder\n\n"
            "hint: ls {here}  # a folder; a hub id is written ORGANISATION/gpt2",
        ),
        (
            "org/model",
            3,
            "`model.path` is `org/model`: it has not been fetched\n\n"
            "hint: hf download org/model  # not in {here}/cache; a folder is written ./org/model",
        ),
        ("s3://bucket/model", 2, "`model.path` is `s3://bucket/model`, a URL; a model is a folder or a hub id"),
    ],
)
@pytest.mark.usefixtures("_nothing_starts")
def test_missing_hub_model_is_noted_unless_required(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str, code: int, says: str
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "cache"))
    words, said = ["r.toml", "--set", f"model.path={path}"], says.format(here=folder)
    for command in (["train"], ["validate", "--assets"], ["plan", "--assets"]):
        assert run([*command, *words]) == code
        assert f"error: --set: {said}\n" in capsys.readouterr().err
    for command in ("validate", "plan"):
        may_be_fetched = path == "org/model"
        assert run([command, *words]) == (0 if may_be_fetched else code)
        err, first = capsys.readouterr().err, said.split("\n")[0]
        assert (f"note: --set: {first}; not checked\n" in err) == may_be_fetched
        assert (f"error: --set: {said}\n" in err) != may_be_fetched


def test_fetched_model_is_found_in_hub_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is also checked against the layout: four tensor ranks do not divide two key/value heads."""
    from huggingface_hub import try_to_load_from_cache

    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "cache"))
    model = folder / "cache/models--org--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("abc123", "utf-8")
    shutil.copytree(folder / "base", model / "snapshots/abc123")
    assert fetched("org/model") == model / "snapshots/abc123" == find_model("org/model", "model.path")
    theirs = try_to_load_from_cache("org/model", "config.json", cache_dir=folder / "cache")
    assert theirs == str(model / "snapshots/abc123/config.json")
    assert check(load([Path("r.toml")], ["model.path=org/model"]).recipe) == []
    with pytest.raises(RecipeError, match="4 tensor ranks do not divide the model's 2 key/value heads"):
        load([Path("r.toml")], ["model.path=org/model", "actor.parallel={tensor=4}"])
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "other"))
    assert fetched("org/model") is None
