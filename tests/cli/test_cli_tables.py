"""Tables on a terminal that is too narrow for them, and elsewhere."""

from collections.abc import Callable

import pytest

from cli.conftest import on_a_terminal
from ppoctl.cli import render
from ppoctl.cli.columns import NAMES, WORDS, block, laid_out, widths_in, wrapped

Print = Callable[[int | None], str]

HEADERS = ("key", "default", "meaning")
ROWS = [
    ("rollout.min_p", "0.0", "Draw from ids at least this many times as likely as the likeliest; 0: from all."),
    ("rollout.seed", "-", "Where the draws begin."),
]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Print:
    """`printed(60)`: the table on a terminal of that width; None: in a file."""

    def printed_at(width: int | None) -> str:
        monkeypatch.setattr("sys.stdout.isatty", lambda: width is not None, raising=False)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(width or 10))
        render.table(ROWS, HEADERS)
        return capsys.readouterr().out

    return printed_at


def test_last_column_wraps_below_itself(printed: Print) -> None:
    screen = """\
key            default  meaning
rollout.min_p  0.0      Draw from ids at least this many
                        times as likely as the likeliest; 0:
                        from all.
rollout.seed   -        Where the draws begin.
"""
    assert printed(60) == screen


def test_row_too_wide_for_columns_is_printed_as_a_block(printed: Print) -> None:
    screen = """\
rollout.min_p
  default: 0.0
  meaning: Draw from ids at least this
    many times as likely as the
    likeliest; 0: from all.
rollout.seed
  meaning: Where the draws begin.
"""
    assert printed(40) == screen


def test_row_that_fits_or_has_no_terminal_is_a_single_line(printed: Print) -> None:
    assert printed(None) == printed(120)
    assert len(printed(None).splitlines()) == 3


@pytest.mark.parametrize("width", range(20, 130, 7))
def test_table_fits_the_terminal_and_loses_no_word(printed: Print, width: int) -> None:
    lines = printed(width).splitlines()
    assert max(map(len, lines)) <= width
    words = {word for row in ROWS for text in row for word in text.split()} - {"-"}
    assert words <= set(" ".join(lines).split())


def test_widest_column_shrinks_after_the_last_column() -> None:
    texts = [("22.9 MiB", "a run of many words that says much", "more than it seems to say")]
    assert widths_in(80, texts, WORDS) == [8, 34, 25]
    assert widths_in(70, texts, WORDS) == [8, 34, 24]  # a column of sentences keeps a readable width
    assert widths_in(60, texts, WORDS) == [8, 24, 24]
    assert widths_in(48, texts, WORDS) == [8, 12, 24]
    assert widths_in(47, texts, WORDS) is None


def test_names_break_after_a_slash_if_spaces_are_not_enough() -> None:
    texts = [("eval/heldout/greedy_pass_at_1", "0.5")]
    assert widths_in(30, texts, WORDS) is None
    assert widths_in(30, texts, NAMES) == [25, 3]
    assert laid_out(texts[0], [25, 3], [False, True], NAMES) == [
        "eval/heldout/              0.5", "greedy_pass_at_1",
    ]  # fmt: skip


def test_long_path_overflows_unbroken() -> None:
    path = "/" + "x" * 50
    widths = widths_in(34, [("at", f"in {path}")], WORDS)
    assert widths == [2, 30]
    assert laid_out(("at", f"in {path}"), widths, [False, False], WORDS) == ["at  in", f"    {path}"]


def test_text_wraps_at_spaces_and_keeps_its_indent() -> None:
    assert wrapped("  one two  three", 9) == ["  one two", "three"]
    assert wrapped("a/b/c d", 3, NAMES) == ["a/", "b/c", "d"]
    assert wrapped("", 3) == [""]


def test_block_has_short_fields_on_one_line() -> None:
    row = ("q1", "finished", "-", "0.5", "")
    assert list(block(row, ("run", "state", "steps", "reward", ""), 40)) == ["q1", "  state: finished   reward: 0.5"]
    assert list(block(row, (), 17)) == ["q1", "  finished", "  0.5"]
    assert list(block(("-", ""), (), 40)) == []


def test_numbers_are_right_aligned_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, width=40)
    render.table([(7, "a text of more words than there is room for here")], ("count", "what"))
    assert "\n    7  a text" in capsys.readouterr().out


def test_prose_wraps_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    text = "  source: one of many papers, and another one"
    render.prose(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    render.prose(text)
    assert capsys.readouterr().out == "  source: one of\n    many papers, and\n    another one\n"
    render.prose("")
    assert capsys.readouterr().out == "\n"


def test_error_message_wraps_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setenv("NO_COLOR", "1")
    text = "stopped by SIGINT at `eval` of step 0\n  its own line goes on too"
    render.error(text)
    assert capsys.readouterr().err == f"error: {text}\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    render.error(text)
    assert capsys.readouterr().err == (
        "error: stopped by\n  SIGINT at `eval` of\n  step 0\n  its own line goes\n    on too\n"
    )
