"""An environment of a user: it answers each turn with the number of the turn's characters, and slowly at times."""

import time

from ppoctl.environments.api import Observation, Turn


class Counts:
    """Three answers, then the end. The reward is the fraction of digits in the turn."""

    def __init__(self) -> None:
        self.turns = 0

    def open(self, row: object, seed: int) -> str | None:
        return "Think first." if seed % 2 else None

    def step(self, turn: Turn) -> Observation | dict[str, object]:
        self.turns += 1
        time.sleep(0.05 * (len(turn.tokens) % 3 == 0))
        digits = sum(character.isdigit() for character in turn.text)
        return {
            "messages": [{"role": "user", "content": f"{len(turn.text)} characters"}],
            "reward": digits / (1 + len(turn.text)),
            "done": self.turns == 3,
            "metrics": {"digits": float(digits)},
        }
