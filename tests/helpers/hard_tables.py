"""A table with every difficulty: gaps of several spellings, dates, times, identifiers, truths, categories, markup."""

import csv
import random
from pathlib import Path

NAMES = ["code", "amount", "rate", "when", "at", "is new", "town", "colour", "free text", "one", "again", "count",
         "<b>width</b> & \"height\""]  # fmt: skip
PLANTED = (17, 333, 801)
GAPS = ["", "NA", "n/a", "NaN", "null", " "]


def rows(n_rows: int = 1000, seed: int = 0, gaps: int = 0) -> list[list[str]]:
    """Lines of the table; ``gaps`` of its amounts are missing, each spelled in another way."""
    dice = random.Random(seed)
    found = []
    for number in range(n_rows):
        amount = round(dice.gauss(100, 15), 2)
        town = dice.choice(["Ulm", "Köln", "Bonn"]) if dice.random() < 0.9 else f"Dorf {dice.randrange(50)}"
        line = [
            f"{number:05d}", str(amount), f"{dice.gauss(0, 1):.4f}",
            f"2024-{1 + number % 12:02d}-{1 + number % 28:02d}",
            f"{dice.randrange(24)}:{dice.randrange(60):02d}", dice.choice(["yes", "no"]), town,
            dice.choice(["red", "None", "blue"]), f"note {number}", "7", str(amount), str(number + 1),
            f"{dice.gauss(5, 1):.3f}",
        ]  # fmt: skip
        if number in PLANTED:
            line[1] = line[10] = str(10_000 + number)
            line[12] = "55"
        found.append(line)
    for gap in range(gaps):
        found[50 + 7 * gap][1] = found[50 + 7 * gap][10] = GAPS[gap % len(GAPS)]
    return found


def write(path: Path, lines: list[list[str]]) -> Path:
    """As a text file with names."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([NAMES, *lines])
    return path
