"""Pieces of a page of HTML that needs nothing else: text is escaped here, and nowhere else."""

from base64 import b64encode
from collections.abc import Iterable, Sequence

from daskrr.storage.urls import escaped as escape

GENERATOR = '<meta name="generator" content="daskrr">'
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --quiet: #55606b; --page: #f5f6f8; --card: #fff; --line: #d9dee3;
  --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8ebee; --quiet: #a9b3bd; --page: #14171a; --card: #1e2327; --line: #363d44; --accent: #56b4e9; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 1rem/1.55 system-ui, sans-serif; }
main, header, footer { max-width: 72rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 2rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 .6rem; }
p { margin: 0 0 .6rem; max-width: 46rem; overflow-wrap: anywhere; }
.quiet, footer, figcaption, caption { color: var(--quiet); font-size: .9rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1.1rem 1.2rem;
  margin: 1.1rem 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem; margin: 1.1rem 0; }
.cards div { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .7rem .9rem;
  border-top: 3px solid var(--accent); }
.cards dt { color: var(--quiet); font-size: .85rem; }
.cards dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1rem;
  align-items: start; }
figure { margin: 0 0 .6rem; max-width: 38rem; }
figcaption { padding: .4rem .2rem 0; }
figure img { display: block; width: 100%; height: auto; background: #fff; border-radius: .4rem; }
.scroll { overflow-x: auto; margin-top: 1rem; }
.scroll th, .scroll td { white-space: nowrap; }
.scroll thead th { border-bottom: 2px solid var(--line); }
.scroll caption span { display: inline-block; position: sticky; left: 0; max-width: calc(100vw - 4rem);
  white-space: normal; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .4rem; }
th, td { padding: .32rem .7rem .32rem 0; border-bottom: 1px solid var(--line); text-align: right; }
th { font-weight: 600; }
tr > :first-child { text-align: left; }
.facts td { text-align: left; overflow-wrap: anywhere; }
.facts th { width: 13rem; vertical-align: top; font-weight: 500; color: var(--quiet); }
.bar { width: 9rem; height: .8rem; vertical-align: middle; }
footer { padding-bottom: 2rem; }
@media (max-width: 40rem) {
  section { padding: .9rem .8rem; }
  .facts th { width: 42%; }
  table { font-size: .84rem; }
  .wide, .scroll thead { display: none; }
  .scroll table, .scroll caption, .scroll tbody { display: block; }
  .scroll tr { display: grid; grid-template-columns: 1fr 1fr; gap: .1rem 1rem; padding: .4rem 0;
    border-bottom: 1px solid var(--line); }
  .scroll th, .scroll td { border: 0; padding: 0; text-align: left; white-space: normal; overflow-wrap: anywhere; }
  .scroll tbody th { grid-column: 1 / -1; }
  .scroll [data-name]::before { content: attr(data-name) " "; color: var(--quiet); font-weight: 400; }
}
@media print { section { break-inside: avoid; } body { background: #fff; } }
"""


def page(title: str, subtitle: str, parts: Iterable[str], foot: str) -> str:
    """A whole page."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{GENERATOR}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<header>\n<h1>{escape(title)}</h1>\n<p class="quiet">{escape(subtitle)}</p>\n</header>\n<main>\n'
        + "\n".join(parts)
        + f"\n</main>\n<footer><p>{escape(foot)}</p></footer>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A part of the page under a heading."""
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def paragraphs(sentences: Iterable[str]) -> str:
    """Text."""
    return "\n".join(f"<p>{escape(one)}</p>" for one in sentences)


def cards(pairs: Iterable[tuple[str, str]]) -> str:
    """Key figures."""
    body = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="cards">{body}</dl>'


def facts(caption: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A table of names and what they stand for."""
    rows = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in pairs)
    return f'<table class="facts"><caption>{escape(caption)}</caption><tbody>{rows}</tbody></table>'


def table(caption: str, names: Sequence[str], rows: Iterable[Sequence[str]], bars: Sequence[str] = ()) -> str:
    """A table of figures, with a picture at the end of each row where there is one.

    In a narrow window every row is a block of its own, in which the figures have their names beside them.
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = []
    for number, (first, *others) in enumerate(rows):
        cells = "".join(
            f'<td data-name="{escape(name)}">{escape(one)}</td>' for name, one in zip(names[1:], others, strict=True)
        )
        shown = f'<td class="wide">{bars[number]}</td>' if bars else ""
        body.append(f'<tr><th scope="row" data-name="{escape(names[0])}">{escape(first)}</th>{cells}{shown}</tr>')
    head += '<th scope="col" class="wide">interval</th>' if bars else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def interval_bar(low: float, middle: float, high: float, most: float) -> str:
    """An interval and a point in it, drawn on a line from 0 to ``most``; the numbers stand beside it."""
    left, dot, right = (100.0 * value / most if most > 0 else 0.0 for value in (low, middle, high))
    return (
        '<svg class="bar" viewBox="-2 0 104 10" preserveAspectRatio="none" aria-hidden="true">'
        '<path d="M0 5H100" stroke="currentColor" stroke-opacity=".25"/>'
        f'<path d="M{left:.2f} 5H{right:.2f}" stroke="#0072b2" stroke-width="4"/>'
        f'<path d="M{dot - 0.6:.2f} 5h1.2" stroke="#d55e00" stroke-width="9"/></svg>'
    )


def figure(svg: str, alternative: str, caption: str) -> str:
    """A picture, with its meaning in words for those who do not see it."""
    data = b64encode(svg.encode()).decode()
    return (
        f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{escape(alternative)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def side_by_side(*parts: str) -> str:
    """In two columns where there is room."""
    return f'<div class="pair">{"".join(parts)}</div>'
