"""Every mutant of `benchmarks/mutants.py` matches the present source; otherwise it could not be applied."""

import tomllib

import pytest

from conventions.conftest import ROOT

TABLES = sorted((ROOT / "benchmarks" / "mutants").glob("*.toml"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_every_mutant_matches_exactly_one_source_location(table) -> None:
    for mutant in tomllib.loads(table.read_text("utf-8")).get("mutant", []):
        text = (ROOT / "src" / "ppoctl" / mutant["file"]).read_text("utf-8")
        assert text.count(mutant["old"]) == 1, f"{mutant['defect']}: {mutant['file']}"
        assert text.replace(mutant["old"], mutant["new"]) != text, mutant["defect"]
