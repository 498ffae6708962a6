"""Hook of mkdocs: the copy button of a console block copies the commands without their prompts."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Move prompts from the text of a page to an attribute, which `site.css` shows; called by mkdocs."""
    return re.sub(r'<span class="gp">([^<]*)</span>', r'<span class="gp" data-prompt="\1"></span>', html)
