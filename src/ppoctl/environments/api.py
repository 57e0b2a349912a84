"""Types for environments that a user writes: `from ppoctl.environments.api import Observation, Turn`.

    class Calculator:                                  or an async function:
        def open(self, row, seed):                         async def calculator(row, seed, ask):
            return None                                        turn = await ask()
        def step(self, turn):                                  turn = await ask("wrong, try again", reward=-0.1)
            return Observation(reward=1.0, done=True)          return 1.0

`open` returns messages that are added to the prompt: None, a text, messages, or an `Observation` with messages only.
`step` returns an `Observation`, a mapping with its keys, or messages, if the episode continues without a reward. A
text is one message with the role `user`, or `tool` if the turn has tool calls. A message is a `Message` or a mapping
with `role` and `content`. All methods may be `async`; `close` may be missing.

`await ask(messages, reward=..., metrics=...)` returns the next turn; the reward is that of the previous turn. The
function returns the reward of the last turn, or None for 0, and the episode ends.

Processes of environments import this module, so it imports only the standard library.
"""

from ppoctl.core.batch.episodes import EnvironmentRow as EnvironmentRow
from ppoctl.core.batch.episodes import Observation as Observation
from ppoctl.core.batch.episodes import ToolCall as ToolCall
from ppoctl.core.batch.episodes import Turn as Turn
from ppoctl.core.batch.prompts import Message as Message
