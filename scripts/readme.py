"""Writes the parts of the README that come from the code, so that they can't grow old: `python -m scripts.readme`.

A test fails when a part differs from what this module would write.
"""

import sys
from pathlib import Path

from app.settings import environment_table

README = Path(__file__).resolve().parent.parent / "README.md"


def settings_table() -> str:
    """Return the table of environment variables."""
    rows = ["| Variable | Default | Meaning |", "|---|---|---|"]
    for name, default, meaning in environment_table():
        shown = f"`{default}`" if default else ""
        rows.append(f"| `{name}` | {shown} | {meaning} |")
    return "\n".join(rows)


def with_part(text: str, name: str, part: str) -> str:
    """Return the text with what stands between `<!-- name:start -->` and `<!-- name:end -->` replaced."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, rest = text.split(start, 1)
    _, after = rest.split(end, 1)
    return f"{before}{start}\n{part}\n{end}{after}"


def main() -> int:
    """Rewrite the README's generated parts."""
    text = README.read_text("utf-8")
    README.write_text(with_part(text, "settings", settings_table()), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
