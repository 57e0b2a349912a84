"""A chat template that cannot write the conversations of an environment is refused before anything starts."""

import json
from pathlib import Path

import pytest

from data import dialogue_families as families
from ppoctl.core.errors import RecipeError
from ppoctl.core.finding import Finding, Level
from ppoctl.data.chat import ChatTemplate
from ppoctl.recipe.loading.load import load
from ppoctl.start.preflight.check import check
from ppoctl.start.preflight.conversations import conversation_notes
from ppoctl.start.preflight.prompt_preview import preview

LIMITS = "turns = 3, tokens = 40"
TOOLS = f"environment={{kind='tools', tools=['calculator'], {LIMITS}}}"
OWN = f"environment={{kind='python', path='env.py:Guess', {LIMITS}}}"
# A template whose text around a message depends on the number of messages.
NUMBERED = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '#%d ' % loop.index + m.content + '<|im_end|>' }}{% endfor %}"
)


def checked(folder: Path, template: str, *sets: str, special: str = "<|eos|>", rows: bool = True) -> list[Finding]:
    (folder / "base" / "chat_template.jinja").write_text(template, "utf-8")
    (folder / "env.py").write_text("class Guess:\n def open(self, row, seed): ...\n def step(self, turn): ...\n")
    config = json.loads((folder / "base" / "tokenizer_config.json").read_text("utf-8"))
    config |= {"bos_token": special, "eos_token": special}
    (folder / "base" / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    recipe = load([Path("r.toml")], ["rollout.max_prompt_tokens=400", "rollout.max_new_tokens=40", *sets]).recipe
    return check(recipe, lambda path: ".".join(path), rows=rows)


@pytest.mark.parametrize(
    ("template", "environment", "says"),
    [
        (families.QWEN25, TOOLS, None),
        (families.LLAMA31, TOOLS, None),
        (families.GEMMA2, OWN, None),
        (families.MISTRAL, OWN, None),
        (families.GEMMA2, TOOLS, "answers with messages of the role `tool`, but the chat template cannot write"),
        (families.MISTRAL, TOOLS, "cannot write `tool` messages: Tool call IDs should be"),
        (
            NUMBERED,
            TOOLS,
            "depends on a system message: '<|im_end|>#4 <|im_end|>' instead of '<|im_end|>#3 <|im_end|>'",
        ),
        (NUMBERED, OWN, "around a message of the role `user` depends on"),
    ],
)
def test_template_that_cannot_write_conversations_is_refused(
    folder: Path, template: str, environment: str, says: str | None
) -> None:
    found = checked(folder, template, environment, rows=False)
    if says is None:
        assert not found
        return
    [problem] = found
    assert says in problem.what
    assert (problem.where, problem.error, bool(problem.hint)) == ("environment.kind", RecipeError, True)


def test_structured_tool_calls_reset_the_results_of_deepseek(folder: Path) -> None:
    """This template writes another start of tool results after the first ones, unless a tool call is between them."""
    assert {found.level for found in checked(folder, families.DEEPSEEK, TOOLS, rows=False)} == {Level.NOTE}
    without = families.DEEPSEEK.replace("{%- set ns.is_first = true %}", "")
    [*_, problem] = checked(folder, without, TOOLS, rows=False)
    assert "depends on an earlier tool call" in problem.what


def test_removed_reasoning_is_noted(folder: Path) -> None:
    note = "the model's chat template removes the reasoning of earlier turns when it renders a complete conversation"
    assert [note in finding.what for finding in checked(folder, families.QWEN3, OWN, rows=False)].count(True) == 1
    for template, environment in ((families.QWEN3, TOOLS), (families.QWEN25, OWN)):
        assert not any(note in finding.what for finding in checked(folder, template, environment, rows=False))


def test_template_that_ignores_tools_is_refused_unless_the_prompt_names_them(folder: Path) -> None:
    says = "has the tool `calculator`, but the prompt of row `train/000000-"
    [problem] = checked(folder, families.NO_TOOLS, TOOLS)
    assert says in problem.what
    assert "does not show tools" in problem.what
    assert "--set data.train.system=" in (problem.hint or "")
    assert not checked(folder, families.NO_TOOLS, TOOLS, "data.train.system=Use the calculator.")
    assert not checked(folder, families.NO_TOOLS, OWN)


def test_preview_shows_the_tools_of_each_set(folder: Path) -> None:
    held = "data.eval.held={format='gsm8k', path='train.jsonl'}"
    sets = [TOOLS, held, "eval.environment={kind='none'}"]
    assert not checked(folder, families.QWEN25, *sets)
    recipe = load([Path("r.toml")], ["rollout.max_prompt_tokens=400", "rollout.max_new_tokens=40", *sets]).recipe
    assert '"name": "calculator"' in preview(recipe, "train", 1).rows[0].text
    assert "calculator" not in preview(recipe, "held", 1).rows[0].text


def test_missing_file_of_an_environment_is_reported_once(folder: Path) -> None:
    there = checked(folder, families.QWEN25, OWN)
    assert not there
    recipe = load([Path("r.toml")], ["rollout.max_prompt_tokens=400", "rollout.max_new_tokens=40", OWN]).recipe
    (folder / "env.py").unlink()
    [problem] = check(recipe)
    assert "the file `" in problem.what
    assert problem.is_missing


def test_environment_that_does_not_start_is_reported_once_at_its_path(folder: Path) -> None:
    """Rows are still checked, without the tools of the environment."""
    held = "data.eval.held={format='gsm8k', path='train.jsonl'}"
    sets = (OWN.replace("Guess", "Gues"), held, "rollout.prompts_per_step=1000")
    start, rows = checked(folder, families.QWEN25, *sets)
    assert (start.where, start.error) == ("environment.path", RecipeError)
    assert start.what.endswith(
        "does not start: AttributeError: `" + str(folder / "env.py") + "` has no `Gues`; it defines Guess"
    )
    assert rows.where == "data.train.path"


def test_every_case_of_a_choice_is_checked(folder: Path) -> None:
    cases = "a={kind='python', path='env.py:Guess'}, b={kind='tools', tools=['calculator']}"
    checked(folder, families.GEMMA2)
    chosen = f"environment={{kind='choose', cases={{{cases}}}, {LIMITS}}}"
    recipe = load([Path("r.toml")], [chosen, "data.train.fields=['environment']"]).recipe
    assert recipe.environment is not None
    with pytest.raises(RecipeError, match="answers with messages of the role `tool`"):
        list(conversation_notes(ChatTemplate.of_folder(folder / "base"), recipe.environment, {}, "environment"))
