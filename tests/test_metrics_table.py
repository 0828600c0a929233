"""The documents list every counter and gauge, with the labels that the code gives it, and no others."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen35.adapters.sglang.seam_metrics import LABELS
from qwen35.services.counters import Counters
from qwen35.services.prometheus import prometheus_text

ROOT = Path(__file__).parents[1]
_ROW = re.compile(r"^\| `qwen35_(\w+)`( \(gauge\))? \|([^|]*)\|([^|]+)\|$", re.MULTILINE)
_METHODS = {"add": "counter", "counter": "counter", "watch": "gauge"}
#: A method that counts under a name which its callers give.
_WRAPPER = "_count"

Metrics = dict[tuple[str, str], set[str]]


def documented(text: str) -> Metrics:
    """Labels by name and kind, of the rows of every table in ``text``."""
    found: Metrics = {}
    for name, gauge, labels, _ in _ROW.findall(text):
        key = (name if gauge else name.removesuffix("_total"), "gauge" if gauge else "counter")
        assert gauge or name.endswith("_total"), f"Prometheus calls a counter {name}_total"
        assert key not in found, f"{name} has two rows"
        found[key] = set(re.findall(r"`(\w+)`", labels))
    return found


def is_counters(node: ast.expr) -> bool:
    """Whether ``node`` is a ``Counters`` by its name, which is the same everywhere."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_") == "counters"


def keywords(call: ast.Call, function: ast.AST) -> set[str]:
    """Labels of a call: its keywords, and for ``**labels`` the keys of the dictionary of that name in ``function``."""
    given = {k.arg for k in call.keywords if k.arg is not None}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and len(node.targets) == 1:
            target = node.targets[0]
            if any(k.arg is None and ast.unparse(k.value) == ast.unparse(target) for k in call.keywords):
                given |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    return given


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def counted(source: str) -> Metrics:
    """Labels by name and kind, of everything that ``source`` counts or watches."""
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    tree, always, wrapped = ast.parse(source), set[str](), list[tuple[str, set[str]]]()
    for function in functions(tree):
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
                continue
            name, labels = call.args[0], keywords(call, function)
            if call.func.attr == _WRAPPER and isinstance(name, ast.Constant):
                wrapped.append((name.value, labels))
            elif call.func.attr in _METHODS and is_counters(call.func.value):
                if isinstance(name, ast.Constant):
                    found[name.value, _METHODS[call.func.attr]] |= labels
                else:
                    assert function.name == _WRAPPER, f"a name that nobody can read: {ast.unparse(call)}"
                    always |= labels
    for name, labels in wrapped:
        found[name, "counter"] |= labels | always
    return dict(found)


def in_code() -> Metrics:
    found: Metrics = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for key, labels in counted(path.read_text(encoding="utf-8")).items():
            found[key] = found.get(key, set()) | labels
    return found


def in_documents() -> Metrics:
    return documented("\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))))


def test_the_tables_list_what_the_code_counts_and_nothing_else() -> None:
    code, tables = in_code(), in_documents()
    assert sorted(code.keys() - tables.keys()) == [], "counted, and in no table of docs/"
    assert sorted(tables.keys() - code.keys()) == [], "in a table of docs/, and counted nowhere"
    assert {key: sorted(labels) for key, labels in tables.items()} == {k: sorted(v) for k, v in code.items()}
    assert {("calls", "counter"), ("scratch_copies", "counter"), ("shadow_error_max", "gauge")} <= code.keys()


def test_a_table_names_a_metric_as_prometheus_does() -> None:
    counters = Counters()
    for (name, kind), labels in in_documents().items():
        given = dict.fromkeys(labels, "x")
        if kind == "gauge":
            counters.watch(name, lambda: 1.0, **given)
        else:
            counters.add(name, **given)
    text = prometheus_text(counters)
    for (name, kind), labels in in_documents().items():
        exported = f"qwen35_{name}" if kind == "gauge" else f"qwen35_{name}_total"
        listed = ",".join(f'{label}="x"' for label in sorted(labels))
        assert f"\n{exported}{{{listed}}} 1.0\n" in text


def test_inside_sglang_a_counter_keeps_every_label() -> None:
    """SGLang's endpoint gets counters with one fixed set of labels; gauges do not go there."""
    for (name, kind), labels in in_documents().items():
        assert kind == "gauge" or labels <= set(LABELS), name


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("def f(self):\n    self._counters.add('a', port=1)", {("a", "counter"): {"port"}}),
        ("def f(counters):\n    counters.watch('b', read, adapter=1)", {("b", "gauge"): {"adapter"}}),
        ("def f(counters):\n    more = {'mode': 1}\n    counters.counter('c', **more)", {("c", "counter"): {"mode"}}),
        (
            "def _count(self, name, **more):\n    self._counters.add(name, port=1, **more)\n"
            "def f(self):\n    self._count('d', what=1)",
            {("d", "counter"): {"port", "what"}},
        ),
        ("def f(self):\n    self._seen.add('e')", {}),
    ],
)
def test_what_code_counts_is_read_from_it(source: str, want: Metrics) -> None:
    assert counted(source) == want


def test_a_name_that_cannot_be_read_is_no_metric_left_out() -> None:
    with pytest.raises(AssertionError, match="nobody can read"):
        counted("def f(counters, name):\n    counters.add(name)")
