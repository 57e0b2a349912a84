"""The lines of a docstring that begin with a mark."""

from ppoctl.recipe.marks import Marked, marked


def test_a_part_goes_on_until_the_next_mark() -> None:
    found = marked("""A loss that
    goes on.

    Formula: l = -A
        ratio
    Source: Schulman: 2017
    Default of: verl
    Figures: policy/loss,
    policy/clip_frac.
    """)
    figures = ("policy/loss", "policy/clip_frac")
    assert found == Marked("A loss that goes on.", "l = -A ratio", "Schulman: 2017", "verl", figures)


def test_a_docstring_without_marks_is_prose() -> None:
    assert marked("Words. The Source: of it.") == Marked("Words. The Source: of it.", "", "", "", ())
