"""Rules of the source tree: who imports whom, sizes of files, and what must not occur."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import quantmla

SOURCE = Path(quantmla.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}

BASE = {"errors", "strict", "files", "dims", "config"}
# What a module or package may import from quantmla; itself is always allowed.
MAY_IMPORT = {
    "__init__": set(),
    "errors": set(),
    "strict": {"errors"},
    "files": {"errors"},
    "dims": {"errors", "checkpoint.families"},
    "config": {"errors", "strict"},
    "quant": BASE,
    "transform": BASE | {"quant"},
    "cache": BASE | {"quant"},
    "checkpoint": BASE | {"quant", "transform", "cache"},
    "kernels": BASE | {"quant", "cache"},
    "engine": BASE | {"quant", "cache", "kernels", "transform", "checkpoint"},
    "text": {"errors"},
    "loading": {"errors"},
    "convert": BASE | {"checkpoint", "text", "loading"},
    "calibrate": BASE | {"quant", "cache", "transform", "checkpoint", "text", "loading"},
    "evaluate": BASE | {"quant", "cache", "kernels", "engine", "checkpoint", "text", "loading"},
    "analyze": BASE
    | {"quant", "cache", "transform", "checkpoint", "text", "loading", "calibrate"}
    | {"engine.clips", "evaluate.manifest", "evaluate.model"},
    "ablate": BASE
    | {"quant", "cache", "transform", "checkpoint", "calibrate", "engine", "evaluate"}
    | {"text", "loading"},
    "report": BASE,
    "bench": BASE | {"cache", "kernels", "evaluate"},
}
MAY_IMPORT_ANYTHING = ("cli", "demo", "__main__")
TRANSFORMERS_IN = ("loading", "calibrate.capture", "convert", "engine", "evaluate")
# Triton kernels; nothing else imports triton, or one of them before it runs.
KERNEL_FILES = ("codes", "common", "decode", "gather", "packed_loop", "prefill", "unpack", "write")
TRITON_IN = ("bench.bf16_decode", *(f"kernels.{name}" for name in KERNEL_FILES))
PUBLIC = {
    "CacheError",
    "CalibrationError",
    "CheckpointError",
    "EvaluationError",
    "GateError",
    "KVScheme",
    "KernelUnavailableError",
    "LayerTransform",
    "MLADims",
    "QuantMLABlock",
    "QuantMLACache",
    "QuantMLAError",
    "Recipe",
    "SchemeError",
    "TextError",
    "UnsupportedModelError",
    "__version__",
    "fuse_checkpoint",
    "run_calibration",
    "use_packed_attention",
    "verify",
}


def dotted(path):
    """Module name below quantmla, such as `quant.affine`; a package is its own folder's name."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imported(tree):
    """Full names of all imported modules, those inside functions included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            names.add(node.module)
    return names


def top_level(tree):
    """The imports that run when the module is imported."""
    return ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], [])


def within(name, allowed):
    return any(name == entry or name.startswith(f"{entry}.") for entry in allowed)


def module_cases():
    return [pytest.param(path, id=dotted(path)) for path in MODULES]


@pytest.mark.parametrize("path", module_cases())
def test_imports_follow_the_layers(path):
    name = dotted(path)
    top = name.split(".")[0]
    names = imported(TREES[path])
    if top not in MAY_IMPORT_ANYTHING:
        allowed = MAY_IMPORT[top] | {top}
        ours = {full.removeprefix("quantmla.") for full in names if full.startswith("quantmla.")}
        assert [entry for entry in sorted(ours) if not within(entry, allowed)] == []
        if not within(name, TRANSFORMERS_IN):
            assert not any(within(full, ["transformers"]) for full in names)
    if name not in TRITON_IN:
        assert not any(within(full, ["triton"]) for full in names)
    assert not any(within(full, ["pickle", "dill", "joblib", "vllm"]) for full in names)


@pytest.mark.parametrize("path", [p for p in module_cases() if p.id not in TRITON_IN])
def test_kernels_are_imported_inside_functions(path):
    kernels = [f"quantmla.{name}" for name in TRITON_IN]
    assert [
        full for full in sorted(imported(top_level(TREES[path]))) if within(full, kernels)
    ] == []


@pytest.mark.parametrize("path", [p for p in module_cases() if p.id.startswith("cli")])
def test_command_line_imports_work_inside_functions(path):
    heavy = {"torch", "transformers", "numpy", "safetensors", "matplotlib", "jinja2"}
    assert {full.split(".")[0] for full in imported(top_level(TREES[path]))} & heavy == set()


@pytest.mark.parametrize("path", module_cases())
def test_nothing_that_runs_code_from_files(path):
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save")}
            assert (node.value.id, node.attr) != ("yaml", "load")
        if isinstance(node, ast.keyword):
            allowed = isinstance(node.value, ast.Constant) and node.value.value is False
            assert node.arg not in {"trust_remote_code", "allow_pickle"} or allowed
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec"}


@pytest.mark.parametrize("path", module_cases())
def test_nothing_unfinished(path):
    text = path.read_text(encoding="utf-8")
    assert not [word for word in ("TODO", "FIXME", "XXX", "NotImplemented") if word in text]


@pytest.mark.parametrize("path", module_cases())
def test_public_things_have_docstrings(path):
    tree = TREES[path]
    assert path.name == "__init__.py" or ast.get_docstring(tree), "module"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


def test_files_stay_small():
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    tests = Path(__file__).parent.rglob("*.py")
    lines_of_tests = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in tests}
    assert {p.name: n for p, n in (lines | lines_of_tests).items() if n > 400} == {}
    assert statistics.median(n for p, n in lines.items() if p.name != "__init__.py") < 200


def test_every_package_folder_has_an_init():
    folders = {path.parent for path in MODULES}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def shape_of(function):
    """The function without its name, docstring, annotations and choice of variable names."""
    copy = ast.parse(ast.unparse(function)).body[0]
    if ast.get_docstring(copy):
        copy.body = copy.body[1:]
    copy.name, copy.returns, copy.decorator_list = "f", None, []
    nodes = list(ast.walk(copy))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local = stored | {n.arg for n in nodes if isinstance(n, ast.arg)}
    numbers = {}

    class Rename(ast.NodeTransformer):
        def visit_Name(self, node):
            if node.id in local:
                node.id = numbers.setdefault(node.id, f"v{len(numbers)}")
            return node

        def visit_arg(self, node):
            return ast.arg(numbers.setdefault(node.arg, f"v{len(numbers)}"))

    return ast.dump(Rename().visit(copy))


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_no_function_exists_twice():
    seen, twice = {}, []
    for path, tree in TREES.items():
        for function in functions(tree):
            if sum(1 for _ in ast.walk(function)) < 30:  # accessors and the like
                continue
            here = f"{dotted(path)}.{function.name}"
            shape = shape_of(function)
            if shape in seen:
                twice.append((seen[shape], here))
            seen[shape] = here
    assert twice == []


def test_duplicates_are_seen_under_other_names():
    first, second, third = ast.parse(
        "def f(x, n):\n    'Doc.'\n    y = x + n\n    return y.sum()\n"
        "def g(a, b):\n    c = a + b\n    return c.sum()\n"
        "def h(a, b):\n    c = a + b\n    return c.mean()\n"
    ).body
    assert shape_of(first) == shape_of(second) != shape_of(third)


def test_public_names():
    assert set(quantmla.__all__) == PUBLIC
    assert [name for name in PUBLIC if getattr(quantmla, name, None) is None] == []
    assert set(dir(quantmla)) >= PUBLIC
    with pytest.raises(AttributeError, match="nothing_like_it"):
        quantmla.nothing_like_it  # noqa: B018


@pytest.mark.parametrize(
    "module",
    [
        "quantmla",
        "quantmla.cli",
        "quantmla.config",
        "quantmla.dims",
        "quantmla.checkpoint.families",
    ],
)
def test_importing_stays_light(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
