"""How many words each page has, and how many it may have; run: python docs/words.py."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
BUDGETS = {
    "index": 350,
    "quickstart": 800,
    "concepts": 950,
    "recognizer": 2000,
    "fine_tuning": 2000,
    "gallery": 150,
    "choosing": 1100,
    "selecting": 1300,
    "training": 2300,
    "recipes": 2200,
    "own_stage": 1250,
    "evidence": 1800,
    "coming_from": 1400,
    "returnn": 1400,
    "questions": 1500,
}
"""Of each page of the sidebar beside the API, code and tables included."""
TOTAL = 19_200


def words(page: str) -> int:
    """The words of a page, without what only a command reads."""
    text = re.sub(r"<!--.*?-->", "", (FOLDER / f"{page}.md").read_text(), flags=re.DOTALL)
    return len([word for word in text.split() if re.search(r"\w", word)])


def main() -> None:
    """Prints a line for each page."""
    for page, most in BUDGETS.items():
        print(f"{page:12}{words(page):7}{most:7}")
    print(f"{'all':12}{sum(map(words, BUDGETS)):7}{TOTAL:7}")


if __name__ == "__main__":
    main()
