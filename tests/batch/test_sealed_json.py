"""Any changed byte in sealed JSON is detected."""

import json
from pathlib import Path

import pytest

from ppoctl.core.batch.sealed_json import intact_lines, seal, sealed_line, unseal, whole_lines
from ppoctl.core.errors import CorruptArtifactError

BODY = {"step": 3, "figures": {"value/mean": -0.25, "nothing": None}, "by": ["a", "b"], "is": True}


@pytest.mark.parametrize("indent", [None, 1])
def test_sealed_json_round_trips(indent: int | None) -> None:
    text = seal(BODY, indent=indent)
    assert unseal(text) == BODY
    assert {name: value for name, value in json.loads(text).items() if name != "seal"} == BODY
    assert text.endswith("}" if indent is None else "\n}\n")


@pytest.mark.parametrize("indent", [None, 1])
def test_unseal_detects_every_flipped_bit(indent: int | None) -> None:
    data = seal(BODY, indent=indent).encode("ascii")
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            if changed[position : position + 1].isspace() and data[position : position + 1].isspace():
                continue  # one white space for another has the same meaning
            with pytest.raises(ValueError):
                unseal(changed.decode("ascii"))


def test_sealed_lines_skip_torn_end_and_report_damage(tmp_path: Path) -> None:
    lines = [sealed_line({"seq": number}) for number in (1, 2, 3)]
    path = tmp_path / "run" / "journal.jsonl"
    torn = lines[0] + lines[1] + lines[2][:-1]
    assert [line.body["seq"] for line in whole_lines(path, torn)] == [1, 2]
    assert [line.end for line in whole_lines(path, torn, offset=100)] == [
        100 + len(lines[0]),
        100 + 2 * len(lines[0]),
    ]
    damaged = lines[0] + lines[1].replace(b"2", b"7", 1) + lines[2]
    with pytest.raises(
        CorruptArtifactError, match=r"journal\.jsonl` is corrupt: line 2: it does not match"
    ) as raised:
        list(whole_lines(path, damaged))
    assert raised.value.hint is not None
    assert raised.value.hint.endswith(f"ppoctl resume {tmp_path / 'run'} --allow-missing")
    assert list(intact_lines(damaged)) == [{"seq": 1}, {"seq": 3}]
    assert list(intact_lines(torn)) == [{"seq": 1}, {"seq": 2}]
    with pytest.raises(CorruptArtifactError, match="line 5: it is not ASCII"):
        list(whole_lines(path, b"\xff\n", line_number=5))
