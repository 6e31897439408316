"""Job files: the options of the commands as keys of a TOML file.

A key is an option without its dashes, and its type, checks and help are those of the option, so that nothing is said
twice. A file is read into the words of a command line, which the command itself then parses.
"""

import difflib
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from daskrr.apps import clusters
from daskrr.apps.cli.options import CLUSTERS, GROUPS, Cluster, LengthScale, PathOr, grouped
from daskrr.apps.cli.parsing import make_kernel, model_arguments, refuse_file, table_arguments
from daskrr.apps.cli.usage import fill_in_kernel
from daskrr.apps.convert.likeness import is_a_table
from daskrr.errors import MOST_LEVELS, DaskrrError, InvalidParameter, is_too_deep
from daskrr.kernels import Kernel
from daskrr.storage.urls import redact

Commands = Mapping[str, click.Command]
Tables = dict[str, dict[str, click.Option]]

_PLACES = click.Command(
    "job",
    params=[
        click.Option(
            ["--input"],
            type=click.Path(),
            required=True,
            help="Path or URL of a Zarr array, or a table.",
        ),
        click.Option(["--output"], type=click.Path(), required=True, help="Path or URL of the scores."),
    ],
)
_RETRIES = click.Command(
    "retries",
    params=[
        click.Option(["--attempts"], type=click.IntRange(min=1), default=3, help="How often to try at most."),
        click.Option(
            ["--wait"],
            type=click.FloatRange(min=0, max=86400),
            default=30.0,
            help="Seconds before the second attempt, doubled before every further one. Only failures that may pass are "
            "tried again: those of storage, network and workers.",
        ),
    ],
)
_EXAMPLE: dict[str, dict[str, Any]] = {
    "": {"input": "points.zarr", "output": "scores.zarr"},
    "kernel": {"kernel": "gaussian", "length-scale": "median"},
    "scores": {"ridge": 1e-3, "landmarks": 300, "certify": True, "seed": 0},
}
_ABOUT_SETTINGS = (
    "Settings of a cluster to start, of which those count that belong to the cluster above: minimum and maximum of its "
    "workers, and whatever else it takes. daskrr.yaml, in the package, lists them with their defaults."
)
_SECRET = re.compile(r"pass(word|wd|phrase)|secret|token|credential|(access|account|api|private).?key", re.IGNORECASE)
_NO_SECRETS = "a job file holds no secrets, since files are copied and kept; put them into the environment"
_MOST_BYTES = 2**20
# Python reads keys with many dots in a time that grows with their square.
_DEEP_KEY = re.compile(rf"""(?:(?:(?<![\w-])[\w-]++|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{MOST_LEVELS}}}""")
_FOUND = {bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a table"}


@dataclass(frozen=True)
class JobFile:
    """A checked job file: ``arguments`` are those of the library, the others the options of the commands."""

    path: Path
    points: str
    table: dict[str, Any]
    output: str
    kernel: Kernel
    arguments: dict[str, Any]
    cluster: dict[str, Any]
    update: dict[str, Any]
    retries: dict[str, Any]


def read(path: Path, commands: Commands, cluster: Mapping[str, Any] | None = None) -> JobFile:
    """Read a job file.

    Parameters
    ----------
    path
        The file.
    commands
        Whose options its keys are.
    cluster
        Options that win over those in the file; with another cluster, they take the place of its table.

    Raises
    ------
    InvalidParameter
        It is wrong somewhere; the message names every mistake.
    """
    mistakes = Mistakes(path)
    content = _load(path)
    settings = _settings(content, mistakes)
    words = _words(content, commands, mistakes)
    mistakes.refuse()
    places = _PLACES.make_context("run", words[""]).params
    names = ["--", places["input"], places["output"]]
    score = [*words["kernel"], *words["scores"], *words["table"], *words["cluster"], *names]
    options = grouped(commands["score"].make_context("run", score).params, "kernel", "model", "table", "cluster")
    table = table_arguments(options["table"])
    if not is_a_table(places["input"]):
        mistakes.made_by("input", refuse_file, places["input"])
        if table:
            mistakes.add("[table]", f"is about tables, and the input {places['input']} is none")
    fill_in_kernel(options)
    kernel = mistakes.made_by("[kernel]", make_kernel, options["kernel"])
    arguments = mistakes.made_by("[scores]", model_arguments, options["model"])
    chosen = _chosen(options["cluster"], cluster or {})
    chosen["settings"] = settings.get(chosen["cluster"] or "local")
    mistakes.made_by("[cluster]", lambda: clusters.check(**chosen))
    mistakes.refuse()
    refresh = commands["update"].make_context("run", [*words["update"], *names]).params["refresh"]
    update = {"refresh": refresh, "allow_functions": options["kernel"]["allow_function"]}
    return JobFile(
        path=path,
        points=places["input"],
        table=table,
        output=places["output"],
        kernel=kernel,
        arguments=arguments,
        cluster=chosen,
        update=update,
        retries=_RETRIES.make_context("run", words["retries"]).params,
    )


def _chosen(of_file: Mapping[str, Any], of_line: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the cluster, whoever gave them."""
    given = {name: value for name, value in of_line.items() if value not in (None, False)}
    return {**of_line} if "cluster" in given else {**of_file, **given}


def tables(commands: Commands) -> Tables:
    """Every table with its keys and the options that these are; keys above all tables are in the one without name."""
    score = commands["score"]
    return {
        "": _keys(_PLACES),
        "kernel": _keys(score, GROUPS["kernel"]),
        "scores": _keys(score, GROUPS["model"]),
        "table": _keys(score, GROUPS["table"]),
        "cluster": _keys(score, GROUPS["cluster"]),
        "update": _keys(commands["update"], ("refresh",)),
        "retries": _keys(_RETRIES),
    }


def _keys(command: click.Command, names: tuple[str, ...] | None = None) -> dict[str, click.Option]:
    options = [one for one in command.params if isinstance(one, click.Option)]
    return {one.opts[0].lstrip("-"): one for one in options if names is None or one.name in names}


def _load(path: Path) -> dict[str, Any]:
    text = _beginning(path)
    if len(text) > _MOST_BYTES:
        raise InvalidParameter(f"{path} is larger than {_MOST_BYTES // 2**20} MiB, which no job file is")
    try:
        decoded = text.decode()
        content = None if _DEEP_KEY.search(decoded) else tomllib.loads(decoded)
    except ValueError as error:
        raise InvalidParameter(f"the job file {path} is not TOML: {error}") from error
    except RecursionError:
        content = None
    if content is None or is_too_deep(content):
        raise InvalidParameter(f"the job file {path} is nested deeper than {MOST_LEVELS} levels")
    return content


def _beginning(path: Path) -> bytes:
    """As much of a file as tells whether it is too large."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidParameter(f"cannot read the job file {path}: {error.strerror}") from error


def _settings(content: dict[str, Any], mistakes: "Mistakes") -> dict[str, dict[str, Any]]:
    """Take out the tables of clusters to start, such as [cluster.slurm], whose keys are not ours."""
    table = content.get("cluster")
    given = {kind: table.pop(kind) for kind in CLUSTERS if kind in table} if isinstance(table, dict) else {}
    for kind, settings in given.items():
        if not isinstance(settings, dict):
            mistakes.add(f"[cluster] {kind}", f"is a table, not {_kind_of(settings)}: write [cluster.{kind}]")
        elif _holds_secrets(settings):
            mistakes.add(f"[cluster.{kind}]", _NO_SECRETS)
    return given


def _holds_secrets(value: Any) -> bool:
    """Whether some key, or some URL, of a nested table looks like a secret."""
    if isinstance(value, dict):
        return any(_SECRET.search(key) or _holds_secrets(one) for key, one in value.items())
    if isinstance(value, list):
        return any(map(_holds_secrets, value))
    return isinstance(value, str) and redact(value) != value


class Mistakes:
    """All that is wrong with a job file, so that it can be told at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: list[str] = []

    def add(self, where: str, what: str) -> None:
        """Remember a mistake."""
        self._found.append(f"{where}: {what}")

    def made_by(self, where: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """What ``work`` returns; None if that shows a mistake."""
        try:
            return work(*arguments)
        except click.UsageError as error:
            self.add(where, error.message)
        except DaskrrError as error:
            self.add(where, str(error))
        return None

    def refuse(self) -> None:
        """Raise what was found, if anything was."""
        if self._found:
            count = "a mistake" if len(self._found) == 1 else f"{len(self._found)} mistakes"
            raise InvalidParameter(f"the job file {self.path} has {count}", *self._found)


def _words(content: Mapping[str, Any], commands: Commands, mistakes: Mistakes) -> dict[str, list[str]]:
    """What a command line would say, table by table."""
    known, words = tables(commands), {}
    for key, value in content.items():
        if key not in known | known[""]:
            mistakes.add(_place("", key, value), _unknown(key, value, "", known, commands["run"]))
    for table, keys in known.items():
        given = content.get(table, {}) if table else {key: content[key] for key in keys if key in content}
        if isinstance(given, dict):
            words[table] = list(_table_words(table, given, known, commands["run"], mistakes))
        else:
            mistakes.add(table, f"is a table, not {_kind_of(given)}: write [{table}], and its keys below")
    return words


def _table_words(
    table: str, given: Mapping[str, Any], known: Tables, run: click.Command, mistakes: Mistakes
) -> Iterator[str]:
    keys = known[table]
    for key, value in given.items():
        if key not in keys:
            mistakes.add(_place(table, key, value), _unknown(key, value, table, known, run))
            continue
        yield from mistakes.made_by(_place(table, key), _option_words, keys[key], value, mistakes.path) or ()
    for key, option in keys.items():
        if _is_required(option) and key not in given:
            mistakes.add(_place(table, key), f"is missing. {option.help}")


def _place(table: str, key: str, value: Any = None) -> str:
    if isinstance(value, dict):
        return f"[{table}.{key}]" if table else f"[{key}]"
    return f"[{table}] {key}" if table else key


def _unknown(key: str, value: Any, table: str, known: Tables, run: click.Command) -> str:
    """Why there is no such key or table, and what may have been meant."""
    if any(map(_SECRET.search, [key, *(value if isinstance(value, dict) else ())])):
        return _NO_SECRETS
    if not isinstance(value, dict):
        homes = [name for name, keys in known.items() if key in keys]
        if homes:
            return f"belongs {f'below [{homes[0]}]' if homes[0] else 'above all tables'}"
        if key in _keys(run):
            return f"is no key: give --{key} to daskrr run"
    what, names = ("table", known) if isinstance(value, dict) and not table else ("key", known[table])
    close = difflib.get_close_matches(key.replace("_", "-"), filter(None, names), n=1)
    listed = ", ".join(filter(None, names))
    return f"there is no such {what}; {f'did you mean {close[0]}?' if close else f'there are {listed}'}"


def _option_words(option: click.Option, value: Any, path: Path) -> list[str]:
    """A value as words of the command line."""
    if option.is_flag:
        _check_kind(option, value)
        return (option.opts if value else option.secondary_opts)[:1]
    values = value if option.multiple and isinstance(value, list) else [value]
    if not values:
        raise click.BadParameter("needs at least one value")
    return [f"{option.opts[0]}={_text(option, one, path)}" for one in values]


def _text(option: click.Option, value: Any, path: Path) -> str:
    """A value as the text of an option, which its type accepts."""
    _check_kind(option, value)
    if isinstance(value, list):
        value = ",".join(map(str, value))
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    if redact(text) != text:
        raise click.BadParameter(
            "has a user name, a password or a query in its URL. A job file holds no secrets, since files are copied "
            "and kept; put them into the environment"
        )
    if isinstance(option.type, click.Path) or (isinstance(option.type, PathOr) and option.type.is_path(text)):
        text = text if "://" in text else str(path.parent / text)
    option.type.convert(text, option, click.Context(_PLACES))
    return text


def _check_kind(option: click.Option, value: Any) -> None:
    name, kinds = _kinds(option)
    if not isinstance(value, kinds) or (isinstance(value, bool) and not option.is_flag):
        raise click.BadParameter(f"must be {name}, not {_kind_of(value)}")


def _kinds(option: click.Option) -> tuple[str, tuple[type, ...]]:
    """What a value may be, in words and as types of Python."""
    kind = option.type
    if option.is_flag:
        return "true or false", (bool,)
    if isinstance(kind, click.types.IntParamType):
        return "an integer", (int,)
    if isinstance(kind, click.types.FloatParamType):
        return "a number", (int, float)
    if isinstance(kind, LengthScale):
        return "a number, a list of numbers, or a string", (int, float, list, str)
    if isinstance(kind, Cluster):
        return f"{', '.join(CLUSTERS)}, or an address", (str,)
    if isinstance(kind, click.Choice):
        return f"one of {', '.join(kind.choices)}", (int, float, str)
    if option.name == "kernel_spec":
        return "a path, a string of JSON, or a table", (str, dict)
    return "a path" if isinstance(kind, click.Path) else "a string", (str,)


def _is_required(option: click.Option) -> bool:
    """Whether a key must be there; a job that is repeated has the same ridge every time."""
    return option.required or option.name == "ridge"


def _kind_of(value: Any) -> str:
    return _FOUND.get(type(value), "a date or time")


def schema(commands: Commands) -> str:
    """Every table and key, in words."""
    text = click.HelpFormatter(width=100)
    text.write_text(
        "A job file is TOML. Its keys are options of daskrr score and daskrr update without the dashes; relative paths "
        "start from the folder of the file. Credentials come from the environment."
    )
    for table, keys in tables(commands).items():
        text.write(f"\n{f'[{table}]' if table else 'above all tables'}\n")
        with text.indentation():
            text.write_dl([(key, f"{_about(option)}. {option.help}") for key, option in keys.items()])
    text.write(f"\n{', '.join(f'[cluster.{kind}]' for kind in CLUSTERS)}\n")
    with text.indentation():
        text.write_text(_ABOUT_SETTINGS)
    return text.getvalue().rstrip()


def _about(option: click.Option) -> str:
    """What a key takes, and its default, if the option and not the library has one."""
    kind = _kinds(option)[0]
    default = option.to_info_dict()["default"]
    listed = f"{kind}, or a list of them" if option.multiple else kind
    if _is_required(option):
        return f"{listed}; required"
    return listed if default in (None, False) else f"{listed}; {default} by default"


def example(commands: Commands) -> str:
    """A job file with every key, those that are not needed as comments."""
    lines = ["# Run it with 'daskrr run', as often as you like; 'daskrr run --check' tells what that would do."]
    for table, keys in tables(commands).items():
        lines += ["", f"[{table}]"] if table else []
        for key, option in keys.items():
            lines += textwrap.wrap(
                f"{option.help} ({_about(option)})", 110, initial_indent="# ", subsequent_indent="# "
            )
            values = _EXAMPLE.get(table, {})
            lines.append(f"{key} = {json.dumps(values[key])}" if key in values else f"# {key} =")
    lines += ["", *(f"# {line}" for line in textwrap.wrap(_ABOUT_SETTINGS, 110)), "# [cluster.slurm]"]
    return "\n".join(lines)
