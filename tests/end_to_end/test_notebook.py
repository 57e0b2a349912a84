"""The notebook of docs/ runs, and prints what it claims."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs/python.ipynb"

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.minutes(1)
def test_notebook_runs_with_its_documented_output(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = ["".join(str(out.get("text") or out["data"]["text/plain"]) for out in cell.outputs) for cell in codes]
    for text in outputs:
        print(text)
    assert "eval/heldout/pass_at_1" in outputs[1]
    assert outputs[4].startswith("(64,")
    assert "(2, 'sampled'): " in outputs[4]
    assert 0 <= float(outputs[5].splitlines()[-1]) <= 1
    assert "temprature" in outputs[6]
    assert "temperature" in outputs[6]
