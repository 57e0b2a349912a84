"""The HTML of a report: template, style and script in one file that asks no network for anything.

What a model wrote may be markup. In the page's words the template engine escapes it; in the JSON no character of
markup is left, so that it cannot end its element; and the page's policy runs one script only, named by its hash.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ppoctl import __version__

FILES = Path(__file__).parent / "page"
SCRIPTS = ("start.js", "axes.js", "chart.js", "stages.js", "tokens.js", "samples.js", "page.js")
"""Parts of the script, in the order in which they are joined."""
MARK = '<meta name="generator" content="ppoctl report'
"""What a file begins with, nearly, that this room has written."""


def html(words: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The whole page."""
    script = '"use strict";\n(() => {\n' + "".join(_file(name) for name in SCRIPTS) + "})();\n"
    style = _file("style.css")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
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


def inert(data: Mapping[str, Any]) -> str:
    """The data as JSON in ASCII without `<`, `>` and `&`: as text of an element it can neither end nor begin one."""
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
