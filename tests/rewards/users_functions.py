"""Correct and faulty functions of a user. Only scorer processes import them."""

import asyncio
from typing import Any

COUNT = 3


def contains(sample: Any, scale: float = 1.0) -> float:
    return scale * float(sample.truth in sample.response)


def told(sample: Any) -> dict[str, float]:
    known = (sample.prompt, sample.messages, sample.truth, sample.fields, sample.finish, sample.token_ids)
    return {"score": len(sample.response), "known": sum(each is not None for each in known)}


def of_tokens(sample: Any) -> list[float]:
    return [0.5 * token for token in sample.token_ids]


def of_the_last_token(sample: Any) -> list[float]:
    return [0.0] * (len(sample.token_ids) - 1) + [1.0]


def of_some_tokens(sample: Any) -> list[float]:
    return [1.0, 2.0]


def many(samples: Any) -> list[int]:
    return [len(samples)] * len(samples)


def one_for_all(samples: Any) -> float:
    return 1.0


def too_few(samples: Any) -> list[float]:
    return [1.0]


EIGHT = asyncio.Barrier(8)


async def meets(sample: Any) -> float:
    """Wait until eight samples are scored at the same time, or for longer than any limit."""
    if sample.response == "hang":
        await asyncio.sleep(600)
    assert sample.response == "8"
    await EIGHT.wait()
    return 1.0


def forgets_to_return(sample: Any) -> None:
    sample.response.strip()


def returns_text(sample: Any) -> str:
    return "1.0"


def without_score(sample: Any) -> dict[str, float]:
    return {"reward": 1.0}


def fails(sample: Any) -> float:
    return float(sample.truth.strip())


def compute_score(data_source: str, solution_str: str, ground_truth: str) -> float:
    return 1.0


def votes(sample: Any) -> dict[str, Any]:
    return {"score": 1, "answer": sample.response.strip(), "short": True}


def nests(sample: Any) -> Any:
    if sample.response != "deep":
        return [1.0]
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested
