"""The HTML of a report: template, style and script in one file that makes no network request.

The output of a model may contain markup. The template engine escapes the markup in the texts of the page. The JSON
contains no markup characters, so that it cannot end the HTML element that contains it. The content security policy of
the page allows only one script, which the policy identifies by a hash.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from ppoctl import __version__

FILES = Path(__file__).parent / "page"
SCRIPTS = ("start.js", "axes.js", "chart.js", "stages.js", "waits.js", "tokens.js", "samples.js", "page.js")
"""Source files of the page's script, in the order in which they are concatenated."""
MARK = '<meta name="generator" content="ppoctl report'
"""Text near the start of every report. A file with this text is recognised as a report."""


def html(words: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Return the complete page as HTML."""
    script = '"use strict";\n(() => {\n' + "".join(_file(name) for name in SCRIPTS) + "})();\n"
    style = _file("style.css")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["marked"] = marked
    environment.loader = jinja2.FileSystemLoader(FILES)
    return environment.get_template("page.html").render(
        **words,
        version=__version__,
        mark=Markup(MARK),
        policy=_policy(script, style),
        style=Markup(style),
        script=Markup(script),
        data=Markup(inert(data)),
    )


def marked(text: Any) -> Markup:
    """Return the text as HTML in which `code` between backticks is an element. Everything else is escaped."""
    parts = [escape(part) for part in str(text).split("`")]
    if len(parts) % 2 == 0:  # a backtick without a second one
        return Markup("`").join(parts)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if at % 2 else part for at, part in enumerate(parts)
    )


def inert(data: Mapping[str, Any]) -> str:
    """Return the data as ASCII JSON without `<`, `>` and `&`. Such text can neither begin nor end an HTML element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _policy(script: str, style: str) -> str:
    nothing = "default-src 'none'; base-uri 'none'; form-action 'none'"
    return f"{nothing}; script-src '{_hash(script)}'; style-src '{_hash(style)}'"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _file(name: str) -> str:
    return (FILES / name).read_text("ascii")
