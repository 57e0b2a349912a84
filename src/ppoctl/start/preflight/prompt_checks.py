"""Checks of every row of the data, read as in training. The chat template is tried on each kind of row."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from ppoctl.core.batch.prompts import Json, Message
from ppoctl.core.errors import DataError, EnvironmentProblemError, PpoctlError
from ppoctl.data.chat import ChatTemplate
from ppoctl.data.framing import Framing
from ppoctl.data.index import Counted, RowSet, scan_set
from ppoctl.data.prompt_set import PromptSet
from ppoctl.data.row_faults import RowFaults
from ppoctl.data.row_files import in_an_epoch
from ppoctl.data.row_tables import AnyRows, ColumnRows, SingleTable
from ppoctl.data.rows import DatasetRow, require_enough, require_in_an_epoch, single_tables
from ppoctl.data.template import PromptTemplate, refused
from ppoctl.data.template_arguments import TemplateArguments
from ppoctl.data.tokenizer import decode, light_tokenizer, load_tokenizer
from ppoctl.environments.environment_table import EpisodeTable
from ppoctl.recipe.loading.rules.rows_rules import TAKEN_ARGUMENTS, has_truth
from ppoctl.rewards.reward_rows import RowCheck
from ppoctl.rewards.scorer_table import ScorerTable

_CHAT_AS_TEXT = re.compile(r"""\s*\[?\s*\{\s*["'](role|content)["']\s*:""")
"""Beginning of a text that is a chat, as JSON or as Python writes it."""
_SHOWN_CHARACTERS = 10


class RowChecks:
    """Checks of the rows of a recipe. They also work if the folder of the model is missing."""

    def __init__(
        self, folder: Path | None, template: ChatTemplate | None, max_tokens: int | None, counted: Counted | None
    ) -> None:
        """Prepare the checks.

        `template` is the chat template of the model; None if it is missing or cannot be used. `max_tokens` is the
        maximum length of a prompt; None if the recipe does not set a maximum. `counted` is called with the number of
        rows that were read.
        """
        self._template, self._max_tokens, self._counted = template, max_tokens, counted
        tokenizer = None if folder is None or template is None else _tokenizer(folder)
        self._renderer = None if tokenizer is None else PromptTemplate(tokenizer, template)

    def examine(
        self,
        table: AnyRows,
        name: str,
        *,
        at_least: int,
        key: str = "rollout.prompts_per_step",
        reward: ScorerTable | None = None,
        environment: EpisodeTable | None = None,
    ) -> Iterator[str | PpoctlError]:
        """Yield notes on the rows of a table, and all errors that the start of a run would raise.

        The errors are those of `data.index.scan_set` and `data.prompt_set.PromptSet`, and of `environment` if it
        rejects rows. They include a RewardError if `reward` cannot score rows, and a DataError if there are fewer
        rows than `at_least`, the number in a round, which `key` sets.
        """
        rows, unsure, scored = Counter[str](), False, None if reward is None else RowCheck(reward, f"data.{name}")
        for source, (its, single) in single_tables(table, name=name).items():
            try:
                found = scan_set(single, name=its, source=source, counted=self._counted)
            except PpoctlError as error:
                unsure = True
                yield error
                continue
            yield from found.remarks()
            results = [*found.faults, *self._tried(found, single, environment)]
            yield from (result for result in results if isinstance(result, str))
            errors = [result for result in results if not isinstance(result, str)]
            # A rule already reports a reward that lacks the ground truth of the training rows.
            is_ruled = name == "train" and reward is not None and reward.reads_truth and not has_truth(single)
            if scored is not None and not is_ruled:
                for row, times in found.different_rows():
                    scored.see(row.id, row.answer, row.fields, times)
            rows["read"] += len(found)
            used = len(found)
            if not errors and not _is_never_rendered(single):
                try:
                    if self._renderer is not None and self._max_tokens is not None:
                        prompts = PromptSet(found, single, self._renderer, self._max_tokens, environment)
                        used = prompts.counts.used
                        if remarks := prompts.counts.remarks():
                            yield f"`data.{its}`: {remarks}"
                        yield from _lost(prompts[0].text, self._renderer, its)
                    require_in_an_epoch(its, used, single.weight)
                except PpoctlError as error:
                    errors.append(error)
            yield from errors
            unsure = unsure or bool(errors)
            rows["in an epoch"] += in_an_epoch(used, single.weight)
        if not unsure:
            yield from _raised(partial(require_enough, rows["in an epoch"], at_least, key))
        if scored is not None:
            yield from _of_scores(scored, table, name, rows["read"])

    def _tried(
        self, rows: RowSet, table: SingleTable, environment: EpisodeTable | None
    ) -> Iterator[str | PpoctlError]:
        """Frame every question, render one question of each kind, and yield notes and errors.

        A chat template may reject some sequences of roles, and may omit some further keys of messages or arguments.
        """
        faults, tried, omitted, as_text = RowFaults(), set[object](), set[tuple[str, str]](), 0
        if _is_never_rendered(table):
            return
        arguments = TemplateArguments(table, environment, name=rows.name)
        try:
            framing = Framing(table, name=rows.name)
            arguments.require_environments(rows)
        except PpoctlError as error:
            yield error
            return
        for row in rows.first_rows():
            try:
                chat = framing.chat(row)
                kind = tuple((message.role, message.content is None, *sorted(message.further)) for message in chat)
                as_text += isinstance(row.question, str) and _CHAT_AS_TEXT.match(row.question) is not None
                if self._template is not None and self._template.text is not None and kind not in tried:
                    tried.add(kind)
                    text = _rendered(self._template, chat, row, arguments.of(row))
                    omitted |= _omitted(self._template, chat, text, arguments.of(row), omitted)
            except DataError as error:
                faults.add(error, row.place, row.id)
            except PpoctlError as error:  # the template is wrong for every row
                yield error
                break
        yield from faults.errors()
        for role, key in sorted(omitted):
            whose = f"`data.{rows.name}`: messages of the role `{role}` have `{key}`"
            yield f"{whose}, which the model's chat template does not always write"
        if as_text:
            yield (
                f"`data.{rows.name}`: {as_text} different questions are chats as text, and each becomes one user "
                "message with JSON: store them as lists of messages, with pandas: `.map(json.loads)`"
            )
        if table.template_args and self._template is not None and self._template.text is not None:
            yield from _unread(table.template_args, self._template.reads, f"data.{rows.name}.template_args")


def _is_never_rendered(table: SingleTable) -> bool:
    """Whether a rule refuses arguments of the chat template, which the template would refuse too."""
    return not table.template_args.keys().isdisjoint(TAKEN_ARGUMENTS)


def _of_scores(scored: RowCheck, table: AnyRows, name: str, read: int) -> Iterator[str | PpoctlError]:
    """Yield the errors and notes of a reward on all rows of a table, after `scored` has seen them."""
    yield from _raised(scored.require)
    if scored.unscored:
        yield (
            f"`data.{name}`: responses to {scored.unscored} of {read} rows are not scored: their reward requires a "
            f"ground truth, and the rows have none{_column_hint(table, name)}"
        )
    if scored.empty:
        yield f"`data.{name}`: {scored.empty} of {read} rows get no score: their ground truth is empty"


def _raised(check: Callable[[], None]) -> Iterator[PpoctlError]:
    try:
        check()
    except PpoctlError as error:
        yield error


def _tokenizer(folder: Path) -> Any:
    """Return the tokenizer of the model; None: the folder has none, or the check of the model reports why it cannot
    be read."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    try:
        return light_tokenizer(folder) or load_tokenizer(str(folder))
    except EnvironmentProblemError:
        return None


def _column_hint(table: AnyRows, name: str) -> str:
    has_no_column = isinstance(table, ColumnRows) and table.answer is None
    return f"; if there is a column: --set data.{name}.answer=COLUMN" if has_no_column else ""


def _rendered(
    template: ChatTemplate, chat: tuple[Message, ...], row: DatasetRow, arguments: Mapping[str, Json]
) -> str:
    try:
        text = template.render(chat, arguments)
        last = replace(chat[-1], content=f"{chat[-1].content} Or not?")
        other = template.render((*chat[:-1], last), arguments)
    except Exception as error:  # a chat template is code: it can fail in any way
        raise refused(row, error) from error
    if not text.strip():
        raise DataError(
            f"the model's chat template renders row `{row.id}` ({row.place}) as empty text",
            hint="fetch the model again",
        )
    if text == other:
        raise EnvironmentProblemError(
            f"the model's chat template omits the question of row `{row.id}` ({row.place})",
            hint="fetch the model again",
        )
    return text


def _omitted(
    template: ChatTemplate,
    chat: tuple[Message, ...],
    text: str,
    arguments: Mapping[str, Json],
    known: Collection[tuple[str, str]],
) -> set[tuple[str, str]]:
    """Return (role, key) of messages without whose further key the template writes the same text. The first and the
    last message with the key are tried, except for the `known` keys."""
    places = dict[tuple[str, str], list[int]]()
    for number, message in enumerate(chat):
        for key in message.further.keys() - {"content"}:
            places.setdefault((message.role, key), []).append(number)
    found = set[tuple[str, str]]()
    for (role, key), numbers in places.items():
        for number in {numbers[0], numbers[-1]} if (role, key) not in known else ():
            further = {other: value for other, value in chat[number].further.items() if other != key}
            without = (*chat[:number], replace(chat[number], further=further), *chat[number + 1 :])
            try:
                is_same = template.render(without, arguments) == text
            except Exception:  # noqa: BLE001 - the template requires the key
                is_same = False
            found |= {(role, key)} if is_same else set()
    return found


def _unread(arguments: Iterable[str], reads: Collection[str], key: str) -> Iterator[str]:
    """Yield a note for each argument that a template does not read. `key` is the recipe key of the arguments."""
    for name in sorted(set(arguments) - set(reads)):
        near = get_close_matches(name, reads, 1)
        meant = f" (it reads `{near[0]}`)" if near else ""
        yield f"`{key}` has `{name}`, which the model's chat template does not read{meant}"


def _lost(text: str, renderer: PromptTemplate, name: str) -> Iterator[str]:
    """Yield a note if the tokens of a prompt do not have all characters of its text. Blanks are not compared."""
    (ids,) = renderer.token_ids([text])
    if lost := _characters(text) - _characters(decode(renderer.tokenizer, ids)):
        yield (
            f"`data.{name}`: the tokens of the first prompt lack {lost.total()} characters of its text, such as "
            f"`{''.join(sorted(lost))[:_SHOWN_CHARACTERS]}`: the model's tokenizer removes or replaces them"
        )


def _characters(text: str) -> Counter[str]:
    """Return the characters of a text with their numbers, without blanks. Equivalent forms of one count as one."""
    return Counter(character for character in unicodedata.normalize("NFC", text) if not character.isspace())
