"""Rows, folders, memory and disk are checked before anything starts."""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from fakes.nvml import FakeNvml
from ppoctl.cli.app import run
from ppoctl.core.batch.prompts import Message
from ppoctl.core.errors import (
    DataError,
    EnvironmentProblemError,
    MissingAssetError,
    OutOfMemoryError,
    PpoctlError,
    RecipeError,
    RewardError,
    StorageError,
)
from ppoctl.core.finding import Level, note, without_missing
from ppoctl.core.machine import memory
from ppoctl.data import index
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe
from ppoctl.start.preflight import resource_checks
from ppoctl.start.preflight.check import check
from ppoctl.start.preflight.model_checks import find_model
from ppoctl.start.preflight.prompt_checks import RowChecks
from ppoctl.start.preflight.resource_checks import disk, gpu_gib_here, shared_gpus
from ppoctl.store.writable_folders import require_new, require_writable
from preflight.conftest import ROWS, edit

GOOD = "\n".join(ROWS) + "\n"
CHAT = '{"question": [{"role": "%s", "content": "1 + 1?"}], "answer": "#### 2"}\n'
WRONG_ROWS: dict[str, tuple[str | bytes, str]] = {
    "no JSON": (GOOD + "{oops\n", "`{file}` line 6 is not JSON: Expecting property name"),
    "no object": ("[1]\n" + GOOD, "`{file}` line 1 is JSON, but not an object with columns"),
    "no column": (GOOD + '{"query": "x", "answer": "#### 1"}\n', "line 6 has no column `question`; its columns are"),
    "null": (GOOD + '{"question": null, "answer": "#### 1"}\n', "line 6: `question` is null, but a prompt must be"),
    "no gold": (GOOD + '{"question": "x", "answer": "1"}\n', "line 6: `answer` does not end in `#### N`"),
    "UTF-16": (GOOD.encode("utf-16"), "`{file}` line 1 is not UTF-8: the file is UTF-16"),
    "Latin-1": ('{"question": "\xe9", "answer": "#### 1"}\n'.encode("latin-1"), "line 1 is not UTF-8: invalid cont"),
    "too deep": ("[" * 100_000 + "\n", "line 1 is nested too deep"),
    "a boss": (GOOD + CHAT % "boss", "line 6: message 1 in `question` has the role `boss`"),
    "an assistant": (GOOD + CHAT % "assistant", "line 6: the last message in `question` is from the assistant"),
    "nothing": ("\n\n", "[data.train] has no rows: `{file}` is empty"),
    "too few": (ROWS[0], "`data.train` has 1 rows, but a step takes 4 (`rollout.prompts_per_step`)"),
}


@pytest.mark.parametrize("case", WRONG_ROWS)
def test_wrong_row_error_names_its_line(folder: Path, case: str) -> None:
    content, says = WRONG_ROWS[case]
    file = folder / "train.jsonl"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    [found] = check(load([Path("r.toml")]).recipe)
    assert says.format(file=file) in found.what
    assert (found.error, bool(found.hint)) == (DataError, True)


def test_all_bad_rows_of_all_sets_are_found_in_one_pass(folder: Path) -> None:
    bad = ['{"question": null, "answer": "#### 1"}', "{oops", '{"question": "x", "answer": "1"}', *ROWS]
    (folder / "train.jsonl").write_text("\n".join([*bad, bad[0], bad[0]]) + "\n")
    (folder / "held.jsonl").write_text(bad[1] + "\n" + ROWS[0] + "\n")
    (folder / "rows.py").write_text("def rows():\n  yield {'prompt': 1}\n  yield {'prompt': 'x'}\n  yield {}\n")
    mix = "data.eval.m={format='mix', sources={a={format='gsm8k', path='held.jsonl'}, b={format='python', "
    sets = ["data.eval.held={format='gsm8k', path='held.jsonl'}", mix + "function='rows.py:rows'}}}"]
    found = [each.what for each in check(load([Path("r.toml")], sets).recipe) if each.is_error]
    train, held, own = (f"`{folder}/{name}" for name in ("train.jsonl`", "held.jsonl`", "rows.py:rows`"))
    assert [what[:90] for what in found[1:3]] == [
        f"{train} line 2 is not JSON: Expecting property name enclosed in double quotes (column 2)"[:90],
        f"{train} line 3: `answer` does not end in `#### N`"[:90],
    ]
    assert found[0] == (
        f"{train} line 1: `question` is null, but a prompt must be text or a list of chat messages; also line 9, "
        "line 10"
    )
    assert [what.partition(":")[0] for what in found[3:4]] == [f"{held} line 1 is not JSON"]
    assert [what.startswith(own) for what in found[4:]] == [True, True]
    assert " row 1: `prompt` is `1` (a int)" in found[4]
    assert " row 3 has no column `prompt`" in found[5]


def test_list_of_bad_rows_has_a_limit(folder: Path) -> None:
    (folder / "train.jsonl").write_text("".join(CHAT % f"r{number}" for number in range(50)) + GOOD)
    found = check(load([Path("r.toml")]).recipe)
    assert len(found) == 21
    assert found[-1].what == "30 more rows are wrong"
    (folder / "train.jsonl").write_text("".join(f'{{"question": {number}}}\n' for number in range(9)) + GOOD)
    [found_once] = check(load([Path("r.toml")]).recipe)
    says = f"`{folder}/train.jsonl` line 1: `question` is `0` (a int), but a prompt must be text or a list of chat"
    assert found_once.what == f"{says} messages; also line 2, line 3, line 4, 5 more rows"


def test_train_and_rollout_report_every_bad_row_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ppoctl.run.run_commands", None)
    (folder / "train.jsonl").write_text(GOOD + "{oops\n[1]\n")
    for command in ("validate", "train", "rollout"):
        assert run([command, "r.toml"]) == 4
        said = capsys.readouterr().err
        assert (said.count("line 6 is not JSON"), said.count("line 7 is JSON, but not an object")) == (1, 1)


@pytest.mark.parametrize("length", [(), ("--set", "epochs=1")])
def test_missing_file_of_rows_is_one_error_of_validate_and_a_note_of_plan(
    folder: Path, length: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.jsonl").unlink()
    if length:
        text = (folder / "r.toml").read_text()
        (folder / "r.toml").write_text(re.sub(r"(?m)^steps = .*\n", "", text))
    says = f"`data.train.path` is `{folder}/train.jsonl`: no such file"
    for command, code in (("validate", 3), ("plan", 3 if length else 0)):
        assert run([command, "r.toml", *length]) == code
        said = capsys.readouterr().err
        assert said.count(says) == said.count("train.jsonl") == 1, said
        assert (f"{says}; not checked" in said) == (code == 0)


@pytest.mark.parametrize(
    "own",
    [
        "reward={kind='python', function='gone.py:f'}",
        "data.train.prompt_file='gone.txt'",
        "data.eval.x={format='python', function='gone.py:f'}",
        "data.eval.x={format='gsm8k', path='gone/*.jsonl'}",
    ],
)
def test_every_missing_file_that_a_recipe_names_is_an_error_of_validate(folder: Path, own: str) -> None:
    assert run(["validate", "r.toml", "--set", own]) == 3
    assert run(["plan", "r.toml", "--set", own]) == 0


def test_rows_without_scorer_are_counted(folder: Path) -> None:
    columns = "data.train={format='columns', path='train.jsonl', prompt='question', answer='answer', fields=['of']}"
    rows = [{**json.loads(row), "of": "a" if number else "b"} for number, row in enumerate(ROWS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [columns, "reward={kind='choose', by='of', cases={b={kind='gsm8k'}}}"]
    [found] = check(load([Path("r.toml")], sets).recipe)
    assert "of [data.train]: 4 rows, first `train/000001-" in found.what
    assert "`of` is `a`, and the reward has no case of that name (cases: `b`)" in found.what
    assert found.error is RewardError
    assert not check(load([Path("r.toml")], [*sets, "reward.cases.a.kind=gsm8k"]).recipe)


def test_unscored_evaluation_rows_are_counted(folder: Path) -> None:
    """If rows select their scorer, each row is checked for the ground truth that its scorer requires."""
    rows = [{"q": "2+2?", "of": of, **truth} for of in "ab" for truth in ({"answer": "#### 4"}, {})]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.py").write_text(
        "import json, pathlib\ndef rows():\n for line in pathlib.Path('held.jsonl').read_text().splitlines():\n"
        "  row = json.loads(line)\n  yield {**row, 'prompt': row['q']}\n"
    )
    cases = "cases={a={kind='gsm8k'}, b={kind='length', at_most=9}}, otherwise={kind='gsm8k'}"
    sets = [f"reward={{kind='choose', by='of', {cases}}}"]
    some = check(load([Path("r.toml")], [*sets, "data.eval.x={format='python', function='rows.py:rows'}"]).recipe)
    lacks = "rows are not scored: their reward requires a ground truth, and the rows have none"
    assert some[-1] == note(f"`data.eval.x`: responses to 1 of 4 {lacks}", kind="data")
    assert {found.level for found in some} == {Level.NOTE}
    columns = "data.eval.x={format='columns', path='held.jsonl', prompt='q', fields=['of']}"
    none = check(load([Path("r.toml")], [*sets, columns]).recipe)
    hint = "if there is a column: --set data.eval.x.answer=COLUMN"
    assert none[-1] == note(f"`data.eval.x`: responses to 2 of 4 {lacks}; {hint}", kind="data")


def test_reward_file_must_exist_and_be_unchanged(folder: Path) -> None:
    sets = ["reward={kind='python', function='mine.py:score'}"]
    [found] = check(load([Path("r.toml")], sets).recipe)
    assert f"the file `{folder}/mine.py` does not exist" in found.what
    (folder / "mine.py").write_text("def score(sample): return 1.0\n")
    recipe = load([Path("r.toml")], sets).recipe
    assert not check(recipe)
    (folder / "mine.py").write_text("def score(sample): return 2.0\n")
    [found] = check(recipe)
    assert "the reward's function has changed" in found.what
    parts = load([Path("r.toml")], ["reward={kind='sum', parts={mine={kind='python', function='mine.py:score'}}}"])
    (folder / "mine.py").write_text("def score(sample): return 3.0\n")
    [found] = check(parts.recipe)
    assert f"--set reward.parts.mine.function={folder}/mine.py:score`" in (found.hint or "")


def test_metric_function_file_must_exist_and_be_unchanged(folder: Path) -> None:
    sets = ["eval.metrics=mine.py:measure"]
    [found] = check(load([Path("r.toml")], sets).recipe)
    assert f"the evaluation's function is `{folder}/mine.py:measure`, but the file" in found.what
    (folder / "mine.py").write_text("def measure(samples): return {}\n")
    recipe = load([Path("r.toml")], [*sets, "eval.metrics.timeout_s=5"]).recipe
    assert recipe.eval.metrics is not None
    assert (len(recipe.eval.metrics.digest), recipe.eval.metrics.timeout_s) == (64, 5.0)
    assert not check(recipe)
    (folder / "mine.py").write_text("def measure(samples): return {'n': 1}\n")
    [found] = check(recipe, lambda path: ".".join(path))
    assert (found.where, "has changed" in found.what) == ("eval.metrics.function", True)
    assert f"--set eval.metrics.function={folder}/mine.py:measure`" in (found.hint or "")


def test_missing_sandbox_is_noted_and_is_an_error_if_strict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    code = ["data.train={format='columns', path='rows.jsonl', prompt='q', answer='a'}", "reward.kind=code"]
    [found] = check(load([Path("r.toml")], code).recipe, rows=False)
    assert "has no safe sandbox for programs (`reward.sandbox` is `namespaces`)" in found.what
    assert (found.error, found.kind) == (MissingAssetError, "reward")
    assert without_missing([found]) == [note(f"{found.what}; not checked", kind="reward")]


def test_each_chat_role_sequence_is_rendered_once(folder: Path) -> None:
    """The third row is the first with its roles, so the error names it."""

    class Template:
        text = "refuses systems"
        asked: ClassVar[list[tuple[str, ...]]] = []

        def render(self, chat: tuple[Message, ...], arguments: object) -> str:
            assert not arguments
            self.asked.append(tuple(message.role for message in chat))
            if chat[0].role == "system":
                raise ValueError("no system here")
            return chat[-1].content

    rows = [[("user", "a")], [("user", "b")], [("system", "s"), ("user", "c")], [("system", "s"), ("user", "d")]]
    lines = [
        json.dumps({"question": [{"role": role, "content": text} for role, text in row], "answer": "#### 1"})
        for row in rows
    ]
    (folder / "train.jsonl").write_text("\n".join(lines), "utf-8")
    table = load([Path("r.toml")]).recipe.data.train
    [error] = RowChecks(None, Template(), None, None).examine(table, "train", at_least=1)  # type: ignore[arg-type]
    assert re.search(r"rejects row `train/000002-.{8}` \(`.*` line 3\): no system here", str(error))
    assert Template.asked == [("user",), ("user",), ("system", "user")]


NAMES = (
    "{% for m in messages %}{{ m.role }}{{ m.name if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
    "{% if think is defined and think %}!{% endif %}"
)
ASKS = {"role": "user", "content": "1 + 1?"}
SAYS = {"role": "assistant", "content": "3", "name": "Bo"}
NOTED: dict[str, tuple[str, object, tuple[str, ...], str]] = {
    "a name that only another role has": (
        NAMES,
        [{**ASKS, "name": "Ann"}, SAYS, ASKS],
        (),
        "`data.train`: messages of the role `user` have `name`, which the model's chat template does not always",
    ),
    "a key of earlier messages": (
        NAMES.replace("m.role == 'assistant'", "loop.index > 2"),
        [ASKS, SAYS, ASKS, SAYS, ASKS],
        (),
        "`data.train`: messages of the role `assistant` have `name`, which the model's chat template does not always",
    ),
    "an argument with another name": (
        NAMES,
        [ASKS],
        ("data.train.template_args={thnk=false, think=true}",),
        "`data.train.template_args` has `thnk`, which the model's chat template does not read (it reads `think`)",
    ),
    "JSON as text": (
        NAMES,
        json.dumps([ASKS]),
        (),
        "`data.train`: 5 different questions are chats as text, and each",
    ),
    "Python as text": (NAMES, str([ASKS]), (), "`data.train`: 5 different questions are chats as text, and each"),
}


@pytest.mark.parametrize("case", NOTED)
def test_what_the_model_will_not_see_is_noted(folder: Path, case: str) -> None:
    template, question, sets, says = NOTED[case]
    (folder / "base" / "chat_template.jinja").write_text(template)
    rows = [{"question": question, "answer": f"#### {number}"} for number in range(5)]
    if isinstance(question, str):
        rows = [{**row, "question": f"{question} {number}"} for number, row in enumerate(rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [found] = check(load([Path("r.toml")], ["rollout.max_prompt_tokens=99", *sets]).recipe)
    assert (found.level, found.what[: len(says)]) == (Level.NOTE, says)


@pytest.mark.parametrize("has_template", [True, False])
def test_characters_that_the_tokenizer_removes_are_noted(folder: Path, *, has_template: bool) -> None:
    if not has_template:
        (folder / "base" / "chat_template.jinja").unlink()
    digits = {"type": "Replace", "pattern": {"Regex": "[0-9]"}, "content": ""}
    edit(folder / "base" / "tokenizer.json", normalizer=digits)
    found = [each.what for each in check(load([Path("r.toml")]).recipe) if each.kind == "data"]
    says = "`data.train`: the tokens of the first prompt lack 2 characters of its text, such as `01`: the model's"
    assert [what[: len(says)] for what in found] == [says]


ONE_ERROR: dict[str, tuple[str, ...]] = {
    "the argument `messages` of the chat template is set by ppoctl": ("data.train.template_args={messages='x'}",),
    "the argument `add_generation_prompt` of the chat template is set by ppoctl": (
        "data.train.template_args={add_generation_prompt=false}",
    ),
    "but [data.train] has none: its rows are dialogues": ("data.train={format='dialogues', path='both.jsonl'}",),
}


@pytest.mark.parametrize("says", ONE_ERROR)
def test_rule_about_rows_is_the_only_error(folder: Path, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    turns = {name: f"\n\nHuman: 1 + 1?\n\nAssistant: {name}" for name in ("chosen", "rejected")}
    (folder / "both.jsonl").write_text(f"{json.dumps(turns)}\n" * 4)
    run(["validate", "r.toml", *(part for each in ONE_ERROR[says] for part in ("--set", each))])
    said = capsys.readouterr().err
    assert (said.count("error: "), says in said) == (1, True), said


@pytest.mark.parametrize(
    ("template", "hint"),
    [
        ("{{ raise_exception('no') }}", "many templates reject system messages"),
        ("{{ 1 / 0 }}", "the template fails: correct it, or the values of"),
        ("{% include 'x' %}", "the template fails: correct it, or the values of"),
        ("{{ messages[0].of.it }}", "the template fails: correct it, or the values of"),
    ],
)
def test_hint_about_a_template_that_fails_is_not_that_of_a_refusal(folder: Path, template: str, hint: str) -> None:
    (folder / "base" / "chat_template.jinja").write_text(template)
    [found] = check(load([Path("r.toml")]).recipe)
    assert found.hint is not None
    assert found.hint.startswith(hint)


def test_row_checks_report_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "EVERY_ROWS", 2)
    told: list[tuple[str, int]] = []
    check(load([Path("r.toml")]).recipe, counted=lambda name, rows: told.append((name, rows)))
    assert told == [("train", 2), ("train", 4)]


def locked(folder: Path) -> Path:
    folder.mkdir()
    folder.chmod(0o500)
    return folder


def as_nobody(ask: Callable[[], None]) -> int:
    """Return the exit code of the error for a process without privileges; root may write anywhere."""
    child = os.fork()
    if not child:
        code = 99
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            ask()
        except PpoctlError as error:
            code = int(error.exit_code) if "Permission denied" in error.message else 98
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_folder_without_permission_raises() -> None:
    # Every parent folder must be accessible; otherwise the process cannot see `shut` at all.
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        seen = locked(Path(above) / "seen")
        seen.chmod(0o555)
        assert as_nobody(lambda: require_writable(seen / "runs" / "small")) == 8
        assert as_nobody(lambda: require_new(seen / "out", "folder")) == 8
        closed = locked(Path(above) / "closed")
        assert as_nobody(lambda: require_writable(closed / "runs" / "small")) == 8
        assert as_nobody(lambda: find_model(str(closed), "model.path")) == 3
        assert list(seen.iterdir()) == list(closed.iterdir()) == []


def test_writable_check_leaves_no_files(tmp_path: Path) -> None:
    require_writable(tmp_path / "runs" / "small")
    require_new(tmp_path / "out", "folder")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(RecipeError, match=r"`.*/out` exists") as caught:
        require_new(tmp_path / "out", "folder")
    assert caught.value.hint == f"name another folder, or move it away: mv {tmp_path}/out {tmp_path}/out.old"
    with pytest.raises(StorageError, match=r"`.*/no` is not a folder"):
        require_new(tmp_path / "no" / "out", "folder")


@pytest.fixture
def small(folder: Path) -> Recipe:
    return load([Path("r.toml")], ['model.dtype="float32"', "generator.kv_cache_mib=64"]).recipe


def test_machine_with_too_little_memory_is_found(small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_bytes", lambda: 8 * 2**30)
    assert resource_checks.memory(small, None).level == Level.OK
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2**29)
    found = resource_checks.memory(small, None)
    assert (found.error, bool(found.hint)) == (OutOfMemoryError, True)
    assert "GiB on this machine with all processes, which has 0.5; most of it is libraries" in found.what


def test_kv_cache_too_small_for_a_sequence_is_found(small: Recipe) -> None:
    """33 tokens of 4 layers with keys and values of 2 heads of 32 numbers, 4 bytes each: 66 KiB; blocks need more."""
    tiny = small.generator.model_copy(update={"kv_cache_mib": 0})
    found = resource_checks.memory(small.model_copy(update={"generator": tiny}), None)
    assert (found.error, found.hint) == (OutOfMemoryError, "raise `generator.kv_cache_mib`")
    assert "vLLM will not start: a sequence of full length needs" in found.what


def test_plan_and_validate_check_machine_only_with_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2**29)
    FakeNvml(count=0).plant(monkeypatch)
    for command in ("validate", "plan"):
        assert run([command, "r.toml"]) == 0
        assert run([command, "r.toml", "--here"]) == 7
        assert "which has 0.5; most of it is libraries" in capsys.readouterr().err
        assert run([command, "r.toml", "--gpu-gib", "80"]) == 0
    capsys.readouterr()
    assert run(["plan", "r.toml", "--here", "--json"]) == 7
    said = json.loads(capsys.readouterr().out)
    assert (said["name"], said["error"]["kind"], said["error"]["exit_code"]) == ("small", "OutOfMemoryError", 7)


def test_disk_with_too_little_space_is_found(small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pairs of float32 states with weights and two moments: two kept, one being written, one saved by a stop; 4
    * 12 bytes * (862,336 + 862,464)."""
    stored = resource_checks.storage_of(small)
    assert stored.states_bytes is not None
    needed = stored.states_bytes + stored.records_kept_bytes
    usage = type(shutil.disk_usage(tmp_path))
    run = tmp_path / "runs/small"
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(2**40, 0, needed))
    assert disk(small, run).level == Level.OK
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(2**40, 0, needed - 1))
    found = disk(small, run)
    assert found.error is StorageError
    assert re.search(r"the disk of `.*` has 79 MiB free, and the run needs 79 MiB", found.what)
    assert (found.hint or "").startswith("free space (df -h ")  # no setting helps
    run.mkdir(parents=True)
    (run / "state").write_bytes(b"x")  # files that the run already has need no additional space
    assert disk(small, run).level == Level.OK


def test_hint_about_a_full_disk_is_a_setting_with_which_the_run_fits(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeping(count: int, every: int) -> Recipe:
        table = small.checkpoint.model_copy(update={"keep_last": count, "every_steps": every})
        return small.model_copy(update={"steps": 40, "checkpoint": table})

    usage = type(shutil.disk_usage(tmp_path))
    for now, enough, setting in (((3, 1), (2, 1), "keep_last=2"), ((2, 8), (2, 4), "every_steps=4")):
        stored = resource_checks.storage_of(keeping(*enough))
        free = (stored.states_bytes or 0) + stored.records_kept_bytes
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: usage(2**40, 0, free))
        found = disk(keeping(*now), tmp_path / "runs/small")
        assert found.is_error
        assert (found.hint or "").startswith(f"--set checkpoint.{setting}  # the run then fits")


def test_train_checks_disk_and_memory_unless_forced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ppoctl.run.startable import Messages, startable

    monkeypatch.setitem(sys.modules, "ppoctl.run.run_commands", None)  # nothing starts, even if a problem is missed
    usage = type(shutil.disk_usage(folder))
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(2**40, 0, 1000))
    assert run(["train", "r.toml"]) == 8
    assert "free, and the run needs" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "ppoctl.run.run_commands", None)
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2**29)
    assert run(["train", "r.toml"]) == 7
    assert "stage `" in capsys.readouterr().err
    loaded = startable([Path("r.toml")], [], Path("runs"), Messages(print), force=True)
    assert (loaded.recipe.name, loaded.forced) == ("small", True)
    assert not Path("runs").exists()


def test_container_memory_limit_is_respected(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    physical = memory.machine_bytes(limit)
    assert physical > 2**28
    for said, wanted in (("max\n", physical), (f"{2**28}\n", 2**28), (f"{2**60}\n", physical)):
        limit.write_text(said, "ascii")
        assert memory.machine_bytes(limit) == wanted


@pytest.mark.parametrize(
    ("gpus", "gib"),
    [
        (FakeNvml(), 40.0),
        (FakeNvml(count=1), 80.0),
        (FakeNvml(count=0), None),
        (FakeNvml(memory=None), None),
        (FakeNvml(fault="Driver Not Loaded"), None),
    ],
)
def test_gpu_memory_is_that_of_smallest_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: FakeNvml, gib: float | None
) -> None:
    gpus.plant(monkeypatch)
    assert gpu_gib_here() == gib


def test_gpus_in_exclusive_process_mode_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*sets: str) -> list[str]:
        return [found.what for found in shared_gpus(load([Path("r.toml")], sets).recipe) if found.is_error]

    FakeNvml(mode=3).plant(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # `make` sets the variable
    several, placed = "generator.engines=2", "cluster.placement='apart'"
    assert said(several, "cluster.ray_address='head:6379'") == said(placed, "cluster.weights='broadcast'") == []
    says = "GPU {} is in compute mode `EXCLUSIVE_PROCESS` ({} of {} GPUs): several processes of a run share a GPU"
    # Without sets, vLLM has its own process next to the trainers'.
    assert said() == said(several) == said(placed) == [says.format(0, 2, 2)]
    [found] = shared_gpus(load([Path("r.toml")]).recipe)
    assert (found.error, found.hint) == (EnvironmentProblemError, "sudo nvidia-smi -c DEFAULT")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert said(several) == [says.format(1, 1, 1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert said(several) == []


def test_tracking_uri_variable_is_optional_for_validate_not_train(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set", "tracking={kind='mlflow', uri='$WHERE_MLFLOW_IS/one'}"]
    monkeypatch.delenv("WHERE_MLFLOW_IS", raising=False)
    says = "`tracking.uri` is `$WHERE_MLFLOW_IS/one`, but `WHERE_MLFLOW_IS` is not set in the environment"
    assert run(["validate", "r.toml", *sets]) == 0
    assert f"note: --set: {says}; not checked\n" in capsys.readouterr().err
    assert run(["validate", "r.toml", *sets, "--assets"]) == 3
    assert f"{says}\n\nhint: export WHERE_MLFLOW_IS=VALUE" in capsys.readouterr().err
    assert run(["train", "r.toml", *sets]) == 3
    assert not Path("runs").exists()
    monkeypatch.setenv("WHERE_MLFLOW_IS", "http://mlflow:5000")
    capsys.readouterr()
    assert run(["validate", "r.toml", *sets, "--assets"]) == 0
    assert "tracking.uri" not in capsys.readouterr().err
