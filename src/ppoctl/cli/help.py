"""Layout of `--help`: a complete sentence for each command in the list, and examples below the help of a command."""

import inspect
import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

EXAMPLES: dict[str, str] = {
    "train": """
        ppoctl train my.toml             # creates runs/NAME, NAME as in my.toml
        ppoctl train my.toml --set name=fast --set actor.optimizer.lr=1e-6
        ppoctl train my.toml --on slurm  # as a Slurm job""",
    "rollout": "ppoctl rollout my.toml",
    "eval": """
        ppoctl eval my                   # the last saved actor of runs/my
        ppoctl eval runs/my/states/actor/000040 --out samples.jsonl
        ppoctl eval Qwen2.5-0.5B my.toml # a model folder, on the sets of a recipe""",
    "resume": """
        ppoctl resume my --plan          # print what a resume would do
        ppoctl resume my                 # resume the run
        ppoctl resume my --set steps=80  # train longer
        ppoctl resume my --back-to 12    # from an older saved step""",
    "validate": """
        ppoctl validate my.toml          # find all errors
        ppoctl validate my.toml --show --reward""",
    "preview": "ppoctl preview my.toml --rows 3",
    "plan": """
        ppoctl plan my.toml --gpu-gib 80 # does the run fit on GPUs of 80 GiB
        ppoctl plan my.toml --here       # does the run fit on this machine""",
    "doctor": """
        ppoctl doctor                    # this machine
        ppoctl doctor my.toml            # and what a recipe requires""",
    "runs": "ppoctl runs --sort eval --state running,finished",
    "status": "ppoctl status my",
    "logs": """
        ppoctl logs my -f                # follow the console until the run ends
        ppoctl logs my --what engines -n 20""",
    "stop": "ppoctl stop my --after step",
    "rm": "ppoctl rm my other",
    "show": """
        ppoctl show my --step 40 --worst      # one sample, token by token
        ppoctl show my --list --sort flipped  # one line per sample
        ppoctl show my --eval --max-reward 0  # what an evaluation got wrong""",
    "plot": """
        ppoctl plot my other --metric reward/score_mean
        ppoctl plot my --out curves.svg""",
    "profile": "ppoctl profile my --step 1",
    "diagnose": "ppoctl diagnose my",
    "report": "ppoctl report my other -o both.html",
    "compare": """
        ppoctl compare my other          # differences, and where samples differ
        ppoctl compare my other --eval   # which is better, and is it significant""",
    "convert-ckpt": """
        ppoctl convert-ckpt runs/my trained --to hf  # the last saved actor
        ppoctl convert-ckpt runs/my critic --to hf --role critic
        ppoctl convert-ckpt runs/my adapter --to peft  # of a run with LoRA
        ppoctl convert-ckpt Qwen/Qwen2.5-0.5B megatron --to megatron
        ppoctl convert-ckpt iter_0000100 out --to hf --like Qwen/Qwen2.5-0.5B""",
    "track": "ppoctl track my",
    "recipes": "ppoctl recipes copy quickstart my-recipes",
    "recipes list": "ppoctl recipes list",
    "recipes table": "ppoctl recipes table > docs/recipes.md",
    "recipes show": "ppoctl recipes show quickstart",
    "recipes copy": "ppoctl recipes copy quickstart my-recipes",
    "recipes keys": """
        ppoctl recipes keys ppo.kl       # a table
        ppoctl recipes keys lr           # every key with `lr` in its name""",
    "recipes metrics": "ppoctl recipes metrics policy/clip_frac",
    "recipes algorithms": "ppoctl recipes algorithms > algorithms.md",
    "recipes coming-from": """
        ppoctl recipes coming-from verl
        ppoctl recipes coming-from verl --defaults > verl.toml""",
}
"""Command -> examples that are printed below the help of the command."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Before a run": ("recipes", "doctor", "validate", "preview", "plan"),
    "Run": ("train", "resume", "stop", "rollout", "eval"),
    "Monitor": ("runs", "status", "logs"),
    "Inspect": ("diagnose", "show", "plot", "compare", "report", "profile"),
    "Export and clean up": ("convert-ckpt", "track", "rm"),
}
"""The commands of `ppoctl` in the order in which a person needs them."""


class Command(TyperCommand):
    """A command whose help shows neither option types nor braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the arguments without braces, because a reader might type the braces."""
        return [re.sub(r"^\{(.*)\}|^\[(\[.*\])\]", r"\1\2", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, in the order in which the command declares them."""
        by_kind: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                by_kind[param.param_type_name].append(_without_types(*record))
        for title, records in zip(("Arguments", "Options"), by_kind.values(), strict=True):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Commands(TyperGroup):
    """Command group whose list shows a complete sentence for each command, on two lines if necessary."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands. typer would truncate each sentence at the edge of the terminal."""
        listed = self.list_commands(ctx)
        sections = SECTIONS if self.name == "ppoctl" else {"Commands": listed}
        for title, names in sections.items():
            commands = [(name.ljust(max(map(len, listed))), self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, _sentence(command.help or "")) for name, command in commands])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, with its examples as the epilog that click prints."""
        command = super().get_command(ctx, cmd_name)
        examples = EXAMPLES.get(cmd_name if self.name == "ppoctl" else f"{self.name} {cmd_name}")
        if command is not None and examples is not None:
            command.epilog = f"\b\nExamples:\n{_lines(examples)}"
        return command


def _without_types(name: str, text: str) -> tuple[str, str]:
    """Return a line of help without types and bounds of numbers. `<a|b>` is a choice, and is kept."""
    return re.sub(r" <[^|>]*>$", "", name), re.sub(r"  \[x>=\S+\]$|; x>=\S+(?=\]$)", "", text)


def _lines(examples: str) -> str:
    return "\n".join(f"  {line}" for line in inspect.cleandoc(examples).splitlines())


def _sentence(text: str) -> str:
    """Return the first sentence, on one line."""
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def as_options(words: list[str]) -> list[str]:
    """Return the words with `help` and `version` replaced by options: `help plan` becomes `plan --help`."""
    if words[:1] == ["help"]:
        return [*words[1:], "--help"]
    return ["--version", *words[1:]] if words[:1] == ["version"] else words


def one_line(message: str) -> str:
    """Return a message of typer on one line. typer prints choices on lines of their own."""
    text = " ".join(message.split()).replace(" ,", ",")
    match = re.fullmatch(r"(Missing \S+ \S+?)\.? Choose from:? (.*)", text)
    return text if match is None else f"{match[1]}: one of {match[2]}"
