"""Correct and faulty metric functions of a user."""

import time
from typing import Any

Sample = dict[str, Any]


def measure(samples: list[Sample], unit: float = 1.0) -> dict[str, float]:
    return {"words": sum(len(sample["response"].split()) for sample in samples) / unit / len(samples)}


def of_fields(samples: list[Sample]) -> dict[str, float]:
    return {"level": sum(sample["fields"]["level"] for sample in samples), "sampled": samples[0]["mode"] == "sampled"}


def raises(samples: list[Sample]) -> dict[str, float]:
    return {"none": 1 / len([sample for sample in samples if not sample])}


def alone(samples: list[Sample]) -> int:
    return len(samples)


def misnamed(samples: list[Sample]) -> dict[str, float]:
    return {"words / sample": len(samples)}


def infinite(samples: list[Sample]) -> dict[str, float]:
    return {"words": len(samples) * float("inf")}


def text(samples: list[Sample]) -> dict[str, str]:
    return {"words": str(samples)}


def leaves(samples: list[Sample]) -> dict[str, float]:
    raise SystemExit(f"{samples}")


def hangs(samples: list[Sample]) -> dict[str, float]:
    time.sleep(60)
    return measure(samples)


def takes_nothing() -> dict[str, float]:
    return {}
