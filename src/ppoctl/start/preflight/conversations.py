"""Checks of whether a chat template can write the conversations of an environment.

The ids of a conversation are extended by suffixes, and no text is rendered again. The suffix must therefore be the
same in every conversation. A template may remove text of earlier turns: training keeps the text.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ppoctl.core.batch.episodes import RejectedMessagesError
from ppoctl.core.batch.prompts import Message
from ppoctl.core.errors import RecipeError
from ppoctl.data.chat import ChatTemplate
from ppoctl.data.suffix_text import MARK, QUESTION, TURN, Chat, suffix_frame
from ppoctl.data.template_arguments import tools_of
from ppoctl.environments.environment_table import EpisodeTable

_ANSWER = {"role": "assistant", "content": "An answer."}
_RESULT = {"role": "tool", "content": "12"}
_EARLIER_CALL = "an earlier tool call"


def _call(name: str) -> Mapping[str, Any]:
    """Return a turn with a tool call that is not part of its content."""
    call = {"type": "function", "id": "abcdefghi", "function": {"name": name, "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


_HISTORIES: Mapping[str, Sequence[Chat]] = {
    "the text of the question": [({"role": "user", "content": "What is 3 + 4?\nThink."}, TURN)],
    "a system message": [({"role": "system", "content": "Be brief."}, *QUESTION, TURN)],
    "the number of earlier turns": [
        (*QUESTION, _ANSWER, *QUESTION, TURN),
        (*QUESTION, _ANSWER, *QUESTION, _ANSWER, *QUESTION, TURN),
    ],
    _EARLIER_CALL: [(*QUESTION, _call("tool"), _RESULT, _call(MARK)), (*QUESTION, _ANSWER, _RESULT, TURN)],
}
"""Difference from the usual history -> histories, each with the turn. Only the first history with an earlier tool
call that the template accepts is used: templates write tool calls, and our turns contain the text of the calls."""
_KEPT = ("earlier-thought", "earlier-answer")
_HINT = "use a model whose chat template writes each message independently of the messages before it"


def conversation_notes(
    template: ChatTemplate, environment: EpisodeTable, arguments: Mapping[str, object], key: str
) -> Iterator[str]:
    """Yield notes on the conversations of an environment with a chat template. `arguments` are the `template_args` of
    the rows. `key` is the recipe key of the environment.

    Raises RecipeError if the template rejects the messages of the environment, or writes them in a way that depends
    on earlier messages.
    """
    for case in environment.kinds.values():
        tools = tools_of(case)
        role = "tool" if tools else "user"
        given = {**arguments, **({"tools": tools} if tools else {})}
        for messages in ([Message(role, "4")], [Message(role, "4"), Message(role, "5")])[: 2 if tools else 1]:
            _require_independent(template, messages, given, key)
        if removed := _removed(template, role, given):
            yield (
                f"the model's chat template removes {removed} of earlier turns when it renders a complete "
                "conversation; training keeps the text that the template would remove"
            )


def _require_independent(
    template: ChatTemplate, messages: Sequence[Message], arguments: Mapping[str, object], key: str
) -> None:
    role = messages[0].role
    try:
        usual = suffix_frame(template.rendered, messages, arguments)
    except RejectedMessagesError as error:
        raise RecipeError(
            f"`{key}` answers with messages of the role `{role}`, but {error}",
            hint="use a model whose chat template accepts tool results, or answer with the role `user` in an "
            f"environment of your own (`{key}.kind` python)"
            if role == "tool"
            else "use a model whose chat template accepts several turns",
        ) from error
    for difference, histories in _HISTORIES.items():
        for history in histories:
            try:
                frame = suffix_frame(template.rendered, messages, arguments, history)
            except RejectedMessagesError:
                continue  # the template rejects this history, so it does not occur
            # After a tool call that is not a content, the end of the call is between the mark and the usual text.
            start, *rest = frame.statics
            if not start.endswith(usual.statics[0]) or rest != list(usual.statics[1:]):
                raise RecipeError(
                    f"`{key}` adds messages to a conversation, but the text that the model's chat template writes "
                    f"around a message of the role `{role}` depends on {difference}: "
                    f"{''.join(frame.statics)!r} instead of {''.join(usual.statics)!r}",
                    hint=_HINT,
                )
            if difference == _EARLIER_CALL:
                break


def _removed(template: ChatTemplate, role: str, arguments: Mapping[str, object]) -> str:
    """Return the kind of text that the template removes from earlier turns; empty: it removes none."""
    thought, answer = _KEPT
    turn = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{answer}"}
    try:
        text = template.rendered((*QUESTION, turn, {"role": role, "content": "4"}), arguments)
    except Exception:  # noqa: BLE001 - a template is code; the other checks report what it rejects
        return ""
    return "the text" if answer not in text else "the reasoning" if thought not in text else ""
