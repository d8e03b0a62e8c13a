"""Rows of a Markdown table."""


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
