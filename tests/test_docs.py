"""The documents: what they tell the reader to type exists, what they link to is there, and generated pages are current."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from eyas.recipes.cli import app
from eyas.recipes.cli_reference import reference
from eyas.recipes.keys import listed_keys, valid_keys
from eyas.recipes.load import load_recipe, shipped_recipes
from eyas.recipes.schema import Recipe
from eyas.recipes.sources import presets

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

SECTIONS = ("target", "data", "features", "head", "init", "train", "tracking", "export", "score")
KEY = re.compile(rf"(?:{'|'.join(SECTIONS)})(?:\.[A-Za-z0-9_\[\]]+)+")
OWN_NAMES = ("data.template_options", "score.arms", "score.prompt_sets", "score.template_options")
"""Keys below which a recipe's writer names things."""
PLACEHOLDERS = {"N": "1", "MINUTES": "60", "INTEGER": "1", "NUMBER": "60", "LAYOUT": "vllm", "SECTION": "train"}
"""Words that stand for a value of which the parser wants more than text, and such a value."""
FILE_SUFFIXES = (".py", ".md", ".json", ".jsonl", ".yaml", ".html", ".partial", ".sbatch")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- reading Markdown ---------------------------------------------------------------------------------------------------


def code_lines(text: str) -> list[str]:
    """Lines of fenced and of indented blocks; lines that end in a backslash are joined with the next."""
    found, fenced = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            found.append(line.strip())
    return "\n".join(found).replace("\\\n", " ").splitlines()


def prose(text: str) -> str:
    """Everything but code blocks."""
    without_fences = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return "\n".join(line for line in without_fences.splitlines() if not line.startswith("    "))


def spans(text: str) -> list[str]:
    """Inline code, with line breaks in it made blanks."""
    return [" ".join(each.split()) for each in re.findall(r"`([^`]+)`", prose(text))]


def yaml_blocks(text: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)


def headings(text: str) -> set[str]:
    """Anchors of a page, as the site makes them."""
    titles = re.findall(r"^#+ +(.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower() for title in titles]
    return {re.sub(r"[-\s]+", "-", each) for each in words}


# --- commands -----------------------------------------------------------------------------------------------------------


def commands_of(text: str) -> Iterator[tuple[list[str], bool]]:
    """The words after `eyas` of every command, and whether it stands in a sentence, where arguments may be left out."""
    for line in code_lines(text):
        yield from ((words, False) for words in _commands(line))
    for span in spans(text):
        yield from ((words, True) for words in _commands(span))


def _commands(line: str) -> Iterator[list[str]]:
    module = re.search(r"-m eyas\.train\b(.*)", line)
    if module and not line.startswith("#"):
        yield ["train", *_words(module.group(1))]
        return
    match = re.match(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?eyas(?: +(?=[a-z-])(.*))$", line)
    if match:
        first, *others = match.group(1).split(" | ")
        yield _words(first)
        yield from (_words(other) for other in others)


def _words(text: str) -> list[str]:
    """Words of a command line up to `&` or `;`, without comment and `...`, with what stands in [brackets] as if meant."""
    plain = re.sub(r"(?<=\s)\[([^\]]*)\]", r"\1", text.replace("[OPTIONS]", ""))
    plain = re.sub(r"([a-z-]+)(?:\|[a-z-]+)+", r"\1", plain)
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(plain, comments=True) if word != "..."]
    return list(itertools.takewhile(lambda word: word not in ("&", "&&", ";", "|"), words))


def parsed(words: list[str], *, in_sentence: bool) -> tuple[str, dict[str, Any]]:
    """The command that the words name, and its parameters."""
    command: Any = get_command(app)
    rest, name = words, "eyas"
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        found = command.commands.get(rest[0])
        assert found is not None, f"there is no command {' '.join([name, rest[0]])}"
        command, name, rest = found, f"{name} {rest[0]}", rest[1:]
    own_options = [option for each in command.params for option in each.opts]
    if not rest or (name == "eyas" and rest[0] in own_options):
        return name, {}  # the name of a command, in a sentence
    try:
        return name, command.make_context(name, [*rest]).params
    except Exception as error:
        if not in_sentence or type(error).__name__ != "MissingParameter":
            raise
        return name, command.make_context(name, [*rest, "RECIPE"]).params


def check_command(words: list[str], *, small_recipe: Path, in_sentence: bool = False) -> None:
    name, params = parsed(words, in_sentence=in_sentence)
    overrides = list(params.get("overrides") or ())
    recipe = params.get("recipe") or (params.get("target") if name == "eyas ceiling" else None)
    if recipe and "=" in recipe:  # `eyas train ... key=value`
        overrides.append(recipe)
    elif recipe:
        check_recipe_name(recipe)
    named = recipe if recipe in shipped_recipes() else small_recipe
    load_recipe(named, overrides=[each for each in overrides if not each.lower().startswith("section.field=")])
    if name == "eyas presets" and params.get("name", "NAME") != "NAME":
        assert params["name"] in presets(), f"no preset {params['name']}"
    section = params.get("section")
    assert section is None or is_key(section), f"no section {section}"


def check_recipe_name(recipe: str) -> None:
    """A shipped name, a file of the checkout, or a name that stands for the reader's own."""
    if recipe.startswith("recipes/"):
        assert (ROOT / recipe).is_file(), f"no file {recipe}"
    elif recipe.islower() and not recipe.endswith((".yaml", ".jsonl")) and ":" not in recipe and "/" not in recipe:
        assert recipe in shipped_recipes(), f"no shipped recipe {recipe}"


@cache
def known_keys() -> frozenset[str]:
    """Every key of a recipe, and every beginning of one."""
    whole = [key.replace(".0.", ".") for key in (*valid_keys(), *listed_keys())]
    return frozenset(".".join(key.split(".")[:count]) for key in whole for count in range(1, key.count(".") + 2))


def is_key(key: str) -> bool:
    plain = re.sub(r"\[\]|\.\d+(?=\.)", "", key)
    return plain in known_keys() or any(plain.startswith(f"{name}.") for name in OWN_NAMES)


def keys_of(text: str) -> Iterator[str]:
    for part in (*spans(text), *code_lines(text)):
        for word in re.split(r"[\s,;(){}]+", part):
            match = KEY.match(word)
            rest = "" if match is None else word[match.end() :]
            if match is None or match.group().endswith(FILE_SUFFIXES) or (rest and rest[0] not in "=:."):
                continue
            yield match.group()


# --- the tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with what every recipe needs and nothing else, so that overrides meet no setting that contradicts them."""
    path = tmp_path_factory.mktemp("docs") / "small.yaml"
    path.write_text("name: small\ntarget: {model: org/name}\ndata: {conversations: chats.jsonl}\n", encoding="utf-8")
    return path


def test_the_page_of_the_command_line_is_current() -> None:
    current = (DOCS / "cli.md").read_text(encoding="utf-8") == reference()
    assert current, "write it again: python -m eyas.recipes.cli_reference"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_commands_parse(page: Path, small_recipe: Path) -> None:
    problems = []
    for words, in_sentence in commands_of(page.read_text(encoding="utf-8")):
        try:
            check_command(words, small_recipe=small_recipe, in_sentence=in_sentence)
        except Exception as error:
            problems.append(f"eyas {shlex.join(words)}: {getattr(error, 'message', '') or error or type(error)}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_recipe_keys_exist(page: Path) -> None:
    assert [key for key in keys_of(page.read_text(encoding="utf-8")) if not is_key(key)] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_pieces_of_recipes_are_valid(page: Path) -> None:
    for block in yaml_blocks(page.read_text(encoding="utf-8")):
        values = yaml.safe_load(block)
        if not set(values) <= {*SECTIONS, "sweep", "name", "seed", "run_dir"}:
            continue  # a site file, say
        base: dict[str, Any] = {"name": "x", "target": {"model": "org/name"}}
        if "data" not in values:
            base["data"] = {"conversations": "chats.jsonl"}
        Recipe.model_validate(base | values)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    problems = []
    for goal in re.findall(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)", prose(text)):
        if goal.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = goal.partition("#")
        target = page if not path else page.parent / path
        if not target.is_file():
            problems.append(f"{goal}: no such file")
        elif anchor and anchor not in headings(target.read_text(encoding="utf-8")):
            problems.append(f"{goal}: no such heading")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_files_and_modules_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = []
    for part in (*spans(text), *code_lines(text)):
        for name in re.findall(
            r"(?<![\w/.-])((?:docs|eval|heads|recipes|slurm|tests|train)/[\w/*.-]*\.(?:py|md|sbatch|sh|yaml))\b", part
        ):
            if not list(ROOT.glob(name)):
                missing.append(name)
        for name in re.findall(r"python3? -m ((?:eyas|tests)(?:\.\w+)+)", part):
            if importlib.util.find_spec(name) is None:
                missing.append(name)
    assert missing == []


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def pages(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            (goal,) = entry.values() if isinstance(entry, dict) else (entry,)
            yield from pages(goal) if isinstance(goal, list) else [goal]

    assert sorted(pages(site["nav"])) == sorted(path.name for path in DOCS.glob("*.md"))


def test_the_version_is_the_same_everywhere() -> None:
    version = PYPROJECT["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# --- the reader of documents itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "eyas rum mine.yaml",
        "eyas score mine.yaml --repeat 3",
        "eyas train mine.yaml train.epoch=1",
        "eyas run smollm2-135m-eagle9-cpu",
        "eyas convert HEAD NEW --to vlm",
        "eyas slurm submit RECIPE --nodes two",
        "accelerate launch -m eyas.train mine.yaml train.epoch=1",
        "eyas presets sharegtp",
        "eyas recipes keys trian",
        "eyas run mine.yaml score.batch_sizes=[0]",
        "CUDA_VISIBLE_DEVICES=1 eyas extract mine.yaml --joint",
    ],
)
def test_wrong_commands_are_noticed(line: str, small_recipe: Path) -> None:
    ((words, _),) = commands_of(f"Run this:\n\n    {line}    # with a comment, and it's fine\n")
    with pytest.raises(Exception, match=r".*"):
        check_command(words, small_recipe=small_recipe)


def test_commands_are_found_in_every_form() -> None:
    text = (
        "Say `eyas check HEAD\n[--target DIR]` or `eyas prepare | train`.\n\n    eyas report A B [--out DIRECTORY]  # x\n\n"
        "```bash\nCUDA_VISIBLE_DEVICES=1 eyas extract mine.yaml \\\n  --join &\n```\n"
    )
    assert list(commands_of(text)) == [
        (["report", "A", "B", "--out", "DIRECTORY"], False),
        (["extract", "mine.yaml", "--join"], False),
        (["check", "HEAD", "--target", "DIR"], True),
        (["prepare"], True),
        (["train"], True),
    ]


def test_wrong_keys_are_noticed() -> None:
    text = "`train.epoch=1`, `data.sources[].path`, `train.losses`, `score.arms.ngram`, `train.py`, `head.nope`"
    assert [key for key in keys_of(text) if not is_key(key)] == ["train.epoch", "head.nope"]
