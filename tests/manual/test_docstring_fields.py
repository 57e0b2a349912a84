"""Docstring fields: lines that begin with a label."""

from ppoctl.recipe.docstring_fields import DocstringFields, parse_docstring


def test_docstring_field_ends_at_next_label() -> None:
    fields = parse_docstring("""A loss that
    goes on.

    Formula: l = -A
        ratio
    Source: Schulman: 2017
    Default of: verl
    Figures: policy/loss,
    policy/clip_frac.
    """)
    figures = ("policy/loss", "policy/clip_frac")
    assert fields == DocstringFields("A loss that goes on.", "l = -A ratio", "Schulman: 2017", "verl", figures)


def test_docstring_without_fields_is_prose() -> None:
    assert parse_docstring("Words. The Source: of it.") == DocstringFields(
        "Words. The Source: of it.", "", "", "", ()
    )


def test_other_names_are_pairs_of_system_and_names() -> None:
    fields = parse_docstring("""Words.

    Other names: verl rloo, rloo_vectorized; OpenRLHF
        dr_grpo (scale = "none")
    Equal scores: 0""")
    assert fields.other_names == (("verl", "rloo, rloo_vectorized"), ("OpenRLHF", 'dr_grpo (scale = "none")'))
    assert fields.equal_scores == "0"
