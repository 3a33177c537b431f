"""The documentation against the code: commands, options, links, code, messages, tree and tables."""

import ast
import importlib.util
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

import quantmla
from quantmla.cli.app import app
from quantmla.config import QuantMLABlock, Recipe

ROOT = Path(__file__).parents[1]
SOURCE = Path(quantmla.__file__).parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
METRICS = {
    "bf16": {"ppl": {"512": 40.0, "2048": 30.0}},
    "methods": [
        {
            "method": "rtn",
            "scheme": "c2r4",
            "ppl": {"512": 44.0, "2048": 36.0},
            "kl": 0.25,
            "top1_flips": 0.125,
            "bytes_per_token": 1112,
            "packed_rows_read": 1234567,
        }
    ],
    "manifest": {
        "quantmla": "0.1.0",
        "revision": "0123456789abcdef+dirty",
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "device": "cpu (2 threads)",
        "seed": 0,
        "created": "2026-11-29T20:00:00+00:00",
    },
}


def fences(language):
    """(page, code) of all fences of a language."""
    return [
        pytest.param(code, id=f"{name}-{number}")
        for name, text in TEXTS.items()
        for number, (found, code) in enumerate(FENCE.findall(text))
        if found == language
    ]


def shown(text):
    """Command lines of a page: lines of its code, indented or fenced, and inline code."""
    prose = FENCE.sub("", text)
    lines = [line for _, code in FENCE.findall(text) for line in code.splitlines()]
    lines += [line for line in prose.splitlines() if line.startswith("    ")]
    return lines + re.findall(r"`([^`\n]+)`", prose)


def options():
    """Options of each verb."""
    verbs = typer.main.get_command(app).commands
    return {name: {"--help", "-h"} | parameters(verb) for name, verb in verbs.items()}


def parameters(verb):
    """Options of a verb, or of all verbs of a group."""
    of_group = (parameters(inner) for inner in getattr(verb, "commands", {}).values())
    return set().union(*(param.opts for param in verb.params), *of_group)


def wrong_options(line, known):
    """What a `quantmla ...` line uses and the command line does not have."""
    words = shlex.split(line, comments=True)
    if words[:1] != ["quantmla"] or len(words) == 1 or words[1] == "VERB":
        return []
    if words[1] not in known:
        return [words[1]]
    flags = {word.partition("=")[0] for word in words[2:] if re.match(r"--?[a-zA-Z]", word)}
    return sorted(flags - known[words[1]])


@pytest.mark.parametrize("name", TEXTS)
def test_shown_commands_exist(name):
    known = options()
    lines = [line.strip() for line in shown(TEXTS[name])]
    commands = [line for line in lines if line.startswith("quantmla ")]
    assert {line: wrong for line in commands if (wrong := wrong_options(line, known))} == {}


@pytest.mark.parametrize("name", TEXTS)
def test_options_named_in_prose_exist(name):
    every = set().union(*options().values())
    prose = FENCE.sub("", TEXTS[name])
    named = re.findall(r"`(--[a-z][a-z-]*)(?:[ =][^`\n]*)?`", prose)
    assert [option for option in named if option not in every] == []


def test_unknown_commands_and_options_are_noticed():
    known = options()
    assert wrong_options("quantmla eval X --reference Y -o Z  # --nonsense", known) == []
    assert wrong_options("quantmla eval X --nonsense 1 -z", known) == ["--nonsense", "-z"]
    assert wrong_options("quantmla nonsense", known) == ["nonsense"]


def test_every_verb_and_its_summary_stand_in_the_overview():
    table = re.findall(r"^\| `quantmla (\w+)` \|", TEXTS["docs/index.md"], re.MULTILINE)
    assert table == list(options())


@pytest.mark.parametrize("name", TEXTS)
def test_make_targets_exist(name):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    used = [m[1] for line in shown(TEXTS[name]) if (m := re.match(r"\s*make ([a-z-]+)", line))]
    assert set(used) <= set(targets)


@pytest.mark.parametrize("name", TEXTS)
def test_relative_links_resolve(name):
    prose = FENCE.sub("", TEXTS[name])
    links = [m for m in re.findall(r"\]\(([^)\s]+)\)", prose) if not m.startswith("https://")]
    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []


def test_every_page_is_reached_from_readme_and_overview():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    readme, overview = TEXTS["README.md"], TEXTS["docs/index.md"]
    assert {page for page in pages if f"(docs/{page})" not in readme} == set()
    assert {page for page in pages - {"index.md"} if f"({page})" not in overview} == set()


@pytest.mark.parametrize("code", fences("python"))
def test_python_compiles_and_imports_what_exists(code):
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "quantmla":
            module = importlib.import_module(node.module)
            names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert [name for name in names if not find_spec(f"{node.module}.{name}")] == []


def test_the_example_of_the_paged_cache_runs(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (code,) = [code for name, code in FENCE.findall(TEXTS["docs/paged.md"]) if name == "python"]
    seen = {}
    exec(compile(code, "docs/paged.md", "exec"), seen)
    assert seen["out"].shape == (1, 1, 16, 512)
    assert seen["out"].isfinite().all()
    assert seen["lse"].isfinite().all()


@pytest.mark.parametrize("code", fences("yaml"))
def test_recipes_are_accepted(code, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(code, encoding="utf-8")
    Recipe.from_yaml(path)


def test_the_recipe_shows_the_defaults(tmp_path):
    (code,) = [code for _, code in FENCE.findall(TEXTS["docs/calibrate.md"]) if "method:" in code]
    path = tmp_path / "recipe.yaml"
    path.write_text(code, encoding="utf-8")
    shown = Recipe.from_yaml(path)
    default = Recipe(scheme=shown.scheme, clip_content=shown.clip_content)
    assert shown == default
    fields = Recipe.model_fields.keys()
    assert [field for field in fields if not re.search(rf"^{field}:", code, re.MULTILINE)] == []


@pytest.mark.parametrize("code", fences("json"))
def test_the_block_is_accepted_and_complete(code):
    block = QuantMLABlock.from_config({"quantmla": json.loads(code)})
    assert list(block.to_config()) == list(json.loads(code))


def test_messages_come_from_the_code():
    constants = [
        node.value
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    messages = re.findall(r"^\| `([^`]+)` \|", TEXTS["docs/troubleshooting.md"], re.MULTILINE)
    assert len(messages) > 40
    assert [m for m in messages if not any(m in constant for constant in constants)] == []


def test_the_tree_lists_every_module_once():
    (tree,) = [code for _, code in FENCE.findall(TEXTS["CONTRIBUTING.md"]) if "errors.py" in code]
    listed, folder = [], ""
    for line in tree.splitlines()[1:]:
        indent, name = re.match(r"( +)(\S+)", line).groups()
        if name.endswith("/"):
            folder = name
        else:
            listed.append(name if len(indent) == 2 else folder + name)
    found = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")]
    found = [name for name in found if name == "__init__.py" or not name.endswith("/__init__.py")]
    assert sorted(listed) == sorted(found)


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_of_this_machine_is_in_the_text(name):
    assert re.findall(r"(?:^|[\s(`'\"])/(?:work|tmp|root|home)\b\S*", TEXTS[name]) == []


def test_the_changelog_has_this_version():
    assert f"## [{quantmla.__version__}]" in TEXTS["CHANGELOG.md"]


@pytest.fixture(scope="module")
def render():
    spec = importlib.util.spec_from_file_location("render", ROOT / "docs" / "render_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_committed_metrics(render):
    for page, name, source, part in render.PARTS:
        text = TEXTS[page]
        if source.is_file():
            filled = render.filled(text, part(json.loads(source.read_text("utf-8"))), name)
            assert filled == text, "run python docs/render_results.py"
        else:
            between = text.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]
            assert "|" not in between, "a table without its file"


def test_rendered_tables(render):
    readme, results = render.readme_part(METRICS), render.results_part(METRICS)
    assert "| C2R4 | RTN | 1,112 | 36.00 | +20.0 % | 0.2500 | 12.5 % |" in readme
    assert (
        "| C2R4 | RTN | 1,112 | 44.00 | 36.00 | +20.0 % | 0.2500 | 12.5 % | 1,234,567 |" in results
    )
    assert "quantmla 0.1.0 at 0123456789ab with local changes, torch 2.13.0" in readme
    for part in (readme, results):
        rows = [line for line in part.splitlines() if line.startswith("|")]
        assert len(rows) == 4
        assert len({row.count("|") for row in rows}) == 1


def test_rendered_timings(render):
    row = {"scheme": "c4r4", "h": 16, "s_q": 1, "batch": 8, "context": 16384, "ours_us": 44.06}
    row |= {"bf16_us": {"flashmla": 48.0, "sdpa": None}, "ratio": 1.0894, "error": 0.00163}
    table = render.decode_part({"rows": [row], "manifest": METRICS["manifest"]})
    assert "| C4R4 | 16 | 1 | 8 x 16,384 | 44.1 | 48.0 |  | 1.09 | 1.6e-03 |" in table
    row = {"scheme": "c2r4", "tokens": 8192, "us": 8.04, "tb_s": 1.5, "copy_tb_s": 3.0}
    table = render.write_part({"rows": [row], "manifest": METRICS["manifest"]})
    assert "| C2R4 | 8,192 | 8.0 | 1.50 | 3.00 | 50 % |" in table


def test_rendered_sensitivity(render):
    path = {"response": 0.02, "random_response": 0.01, "g": 2.0, "t": 1.6, "a": 1.25, "ta": 2.0}
    shares = {"matching": 0.2, "aggregation": 0.9, "interaction": 0.01, "crossed_terms": -0.11}
    layer = {
        "layer": 7,
        "content": path | {"o": 0.5},
        "rope": path | {"response": 0.05, "o": -0.5},
        "response_ratio": 2.5,
        "content_shares": shares,
        "bound": {form: {"ratio": 1e-3} for form in ("centred", "weighted_centred")},
    }
    names = ("content", "rope", "ratio_of_means", "mean_of_ratios", "ratio_of_mean_roots")
    model = {"response": {name: {"value": 2.5, "ci95": [2.25, 2.75]} for name in names}}
    model["response"]["rope"] = {"value": 0.05, "ci95": None}
    model |= {name: path | {"o": 0.0} for name in ("content", "rope")}
    result = {"sensitivity": {"model": model, "layers": [layer]}, "manifest": METRICS["manifest"]}
    response = render.response_part(result)
    assert "| RoPE / content, ratio of means | 2.5 | 2.25 to 2.75 |" in response
    assert "| RoPE path, mean of layers | 0.05 | too few windows |" in response
    assert "Measured with quantmla 0.1.0" in response
    assert "| content | 2 | 1.6 | 2 | 0 | 1.25 | 0.01 |" in render.amplification_part(result)
    row = "| 7 | 0.0200 | 0.0500 | 2.50 | 1.25 | 1.25 | 0.25 | -0.25 | 0.200 | 0.900 | 0.010 "
    assert row + "| -0.110 | 1.0e-03 | 1.0e-03 |" in render.layers_part(result)


def test_filling_replaces_only_what_is_between_the_markers(render):
    begin, end = "<!-- results:begin -->", "<!-- results:end -->"
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    once = render.filled(page, "new")
    assert once == f"before\n{begin}\nnew\n{end}\nafter\n"
    assert render.filled(once, "new") == once
    for broken in ("no markers", page + begin, f"{end}{begin}"):
        with pytest.raises(ValueError, match="once each"):
            render.filled(broken, "new")
