"""The docs are true: every plan, command and Python example in them runs, every link leads somewhere.

A page runs from its top to its end in one folder, which holds what its text names: `base-model` (a tiny Llama of eight
layers with a tokenizer), `base-encoder` (a tiny RoBERTa), `mixture-model` (a tiny Qwen3-MoE), LoRA adapters, texts. An
HTML comment before a block says what is otherwise: `<!-- base: FOLDER -->` (of a plan), `<!-- exits 0 1 -->` (line by
line), `<!-- not run: why -->`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

import surgeon
from benchmarks import claims
from benchmarks.walks import first_hour
from surgeon.anatomy.skeleton import IMAGE_TEXT
from surgeon.cli import app
from surgeon.cli.entries import ENTRIES
from surgeon.common.yaml import parse_yaml
from surgeon.lab.studies.config.loading import load_study
from surgeon.operations import OPERATIONS
from surgeon.training import gate_fitting
from tests import quoted, reference_pages, tiny
from tests.decoders import tiny_decoder
from tests.house import PACKAGE
from tests.models.test_tokens import byte_tokenizer
from tests.quantised import tiny_quantised
from tests.reference_pages import operations

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS]

BLOCK = re.compile(r"^(?:<!-- ([^\n]*?) -->\n)?```(\w+)\n(.*?)^```$", re.M | re.S)
# Configs of other tools say in their first line whose they are.
FOREIGN = re.compile(r"# (mergekit|LLaMA-Factory|PEFT|axolotl)\b")
NAMED = re.compile(r"# ([\w-]+\.yaml)\b")

# peft and trl ask transformers for what transformers deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    # Trainer's default, on a machine without an accelerator.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with what the comment before it says."""

    kind: str
    text: str
    said: str
    line: int


def blocks(page: Path) -> list[Block]:
    return blocks_of(page.read_text(encoding="utf-8"))


def blocks_of(text: str) -> list[Block]:
    return [
        Block(match[2], match[3], match[1] or "", text.count("\n", 0, match.start(2)) + 1)
        for match in BLOCK.finditer(text)
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


RUNNABLE = [page for page in PAGES if any(b.kind in ("yaml", "sh", "python") for b in blocks(page))]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages may name, made once and copied from here."""
    folder = tmp_path_factory.mktemp("tools")
    tiny.checkpoint(folder / "base-model", "llama", num_hidden_layers=8, vocab_size=300)
    byte_tokenizer(folder / "base-model", eos=True)
    (folder / "base-model" / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# A tiny Llama\n")
    tiny.checkpoint(folder / "tied-model", "qwen3", num_hidden_layers=2, vocab_size=300)
    byte_tokenizer(folder / "tied-model", eos=True)
    tiny_quantised(folder / "quantised-model", "qwen3", "fp8", vocab_size=300)
    byte_tokenizer(folder / "quantised-model", eos=True)
    experts = {"num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 16}
    tiny.checkpoint(folder / "mixture-model", "qwen3_moe", num_hidden_layers=2, vocab_size=300, **experts)
    byte_tokenizer(folder / "mixture-model", eos=True)
    tiny_decoder(folder / "image-text-model", "llava", IMAGE_TEXT, vocab_size=300)
    byte_tokenizer(folder / "image-text-model", eos=True)
    tiny.checkpoint(folder / "base-encoder", "roberta", vocab_size=300)
    byte_tokenizer(folder / "base-encoder", eos=True)
    for number, name in enumerate(("french", "german")):
        _adapter(folder / "base-model", folder / "adapters" / name, seed=number)
    words = "It was a bright cold day, and the clocks were striking.\n"
    chats = ({"instruction": f"Say {n}.", "output": f"{n}, as you wish."} for n in range(40))
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)) + "\n")
    for name in ("wiki", "en", "fr", "de", "medicine"):
        # Two documents, of which one can be held out.
        (folder / f"{name}.txt").write_text(f"{name}: {words}" * 150)
        lines = (json.dumps({"text": f"{name} {number}: {words * 3}"}) for number in range(20))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages' own, of all that is kept: other tests keep proofs alone."""
    return tmp_path_factory.mktemp("caches")


def _adapter(base: Path, folder: Path, *, seed: int) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    targets = ["q_proj", "v_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_what_a_page_shows_runs(
    page: Path, tools: Path, caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tools, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    # What one command finds out of a base the next one knows, as on a user's machine.
    monkeypatch.setenv("SURGEON_CACHE", str(caches))
    monkeypatch.setattr(gate_fitting, "_STEPS", 200)
    names = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page)):
        if block.said.startswith("not run: "):
            continue
        where = f"{name_of(page)}:{block.line}"
        if block.kind == "yaml":
            _plan(block, where, tmp_path, number)
        elif block.kind == "sh":
            _commands(block, where)
        elif block.kind == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text, where, "exec"), names)


def _plan(block: Block, where: str, folder: Path, number: int) -> None:
    if FOREIGN.match(block.text):
        assert yaml.safe_load(block.text), where
        return
    named = NAMED.match(block.text)
    path = folder / (named[1] if named else "plan.yaml")
    path.write_text(block.text, encoding="utf-8")
    # As surgeon reads it: to YAML 1.1 a key `on` is a truth value.
    asked = parse_yaml(block.text, where, what="page", needs="something").data
    if "surgeon_continual" in asked:
        short = {"steps": 2, "batch": 2, "length": 16}
        path.write_text(json.dumps(asked | {"train": asked["train"] | short, "validation_sequences": 2}))
        return
    if "surgeon_data" in asked:
        return
    if "surgeon_study" in asked:
        load_study(path)
        return
    if "surgeon_train" in asked:
        # As it stands, but for a moment: two steps of two short sequences, or of epochs next to nothing.
        short = {"epochs": 0.01} if "epochs" in asked else {"steps": 2}
        path.write_text(
            json.dumps({"recall_for_gate": 64} | asked | short | {"batch": 2, "length": 16, "validation_sequences": 2})
        )
        return
    base = folder / (block.said.removeprefix("base: ") or "base-model")
    if "merge_branches" in block.text:
        # A plan that takes apart what another made.
        base = folder / f"base-{number}"
        surgeon.apply("control-llm", str(folder / "base-model"), base)
    shown = surgeon.preview(path, str(base))
    applied = surgeon.apply(path, str(base), folder / f"applied-{number}")
    assert len(applied.manifest.layers) == len(shown.blueprint.layers), where


def _commands(block: Block, where: str) -> None:
    lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    codes = [int(code) for code in block.said.removeprefix("exits ").split()] or [0] * len(lines)
    assert len(codes) == len(lines), where
    for line, code in zip(lines, codes, strict=True):
        program, *arguments = shlex.split(line, comments=True)
        assert program == "surgeon", f"{where}: {line}"
        ran = CliRunner().invoke(app, arguments)
        assert ran.exit_code == code, f"{where}: {line}\n{ran.output}\n{ran.exception}"


def test_pages_say_what_they_do_not_run() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.kind in ("yaml", "sh", "python", "text", "bibtex"), (
                f"{name_of(page)}:{block.line}: {block.kind}"
            )
            if block.said.startswith("not run"):
                assert len(block.said) > len("not run: why"), f"{name_of(page)}:{block.line}"


def _synopses(text: str) -> Iterator[str]:
    for match in re.finditer(r"(?:^    |`)(surgeon [a-z-]+[^`\n]*)", text, re.M):
        yield match[1]


def _synopses_not_run(page: Path) -> Iterator[str]:
    """Commands of the blocks that `test_what_a_page_shows_runs` leaves out."""
    for block in blocks(page):
        if block.kind == "sh" and block.said.startswith("not run: "):
            lines = block.text.replace("\\\n", " ").splitlines()
            yield from (line for line in lines if re.match(r"surgeon [a-z]", line))


@cache
def options() -> dict[str, set[str]]:
    """Every command's options."""
    root = typer.main.get_command(app)
    return {
        name: {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
        for name, command in root.commands.items()  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_options_that_are_named_exist(page: Path) -> None:
    known = options()
    for synopsis in (*_synopses(page.read_text(encoding="utf-8")), *_synopses_not_run(page)):
        command = synopsis.split()[1]
        # `surgeon preview | apply`; options of the whole stand before a command.
        assert command in known, f"{name_of(page)}: {synopsis}"
        for option in re.findall(r"(?<!\S)(--[a-z-]+)", synopsis.split("  ")[0]):
            assert option in known[command], f"{name_of(page)}: {synopsis}: {option}"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)}: {target}"
        if anchor:
            prose = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.S)
            headings = [*map(_anchor, re.findall(r"^#+ (.*)$", prose, re.M))]
            # A heading that stands there twice has two anchors, which sites count differently.
            assert headings.count(anchor) == 1, f"{name_of(page)}: {target}"


# The pages that a script writes whole.
WRITTEN = reference_pages.PAGES.keys()
# Of hand-written prose: the words outside of code blocks and of what scripts write.
MOST_WORDS, MOST_OF_A_PAGE, MOST_OF_README = 20_000, 1_800, 400
# Pages of docs/ that people write; those that a script writes whole do not count.
MOST_PAGES = 24
# Words that people for whom English is a second language stumble over; docs, help and messages do without.
AVOIDED = re.compile(
    r"\b(fore(tel\w*|told)|tell(s|ing)?|told|anew|born with|newborn|bears?|patience|hears of|ears|troubles?)\b", re.I
)
# What a statistic does with two methods has no other name.
APART = re.compile(r"\b(tell|told)( \w+){0,3} apart\b|\btells\b[^.]*\bapart\b", re.I)


def prose(page: Path) -> str:
    """The text of a page without code blocks, comments and what scripts write."""
    if page.parent == reference_pages.DOCS and page.name in WRITTEN:
        return ""
    written = r"<!-- (?:figures: .*?<!-- end of figures|written by .*?<!-- until here) -->"
    text = re.sub(written, "", page.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"<!--.*?-->", "", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), flags=re.S)


def test_there_are_few_pages_by_hand() -> None:
    written = {reference_pages.DOCS / name for name in WRITTEN}
    assert written < set(DOCS)
    assert len(set(DOCS) - written) <= MOST_PAGES


def test_no_page_is_long_and_all_of_them_can_be_read() -> None:
    words = {name_of(page): len(prose(page).split()) for page in [ROOT / "README.md", *DOCS]}
    assert words["README.md"] <= MOST_OF_README
    assert not {name: count for name, count in words.items() if count > MOST_OF_A_PAGE}
    assert sum(words.values()) <= MOST_WORDS


def test_the_first_hour_is_short_and_has_what_its_script_runs() -> None:
    page = ROOT / "docs" / "tutorial" / first_hour.PAGE
    text, at = page.read_text(encoding="utf-8"), 0
    for step in first_hour.STEPS:
        files = [f"# {name}\n{content}" for name, content in step.writes]
        for part in () if step.hidden else (step.title, step.says, *files, f"```sh\n{step.command}\n", step.then):
            at = text.find(part, at)
            assert at >= 0, part
    assert len(prose(page).split()) <= 900


def test_the_first_hour_succeeds_and_recovers_three_times() -> None:
    assert [step.exits for step in first_hour.STEPS if step.exits] == [2, 2, 2]
    assert all(step.names for step in first_hour.STEPS if step.exits)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_use_plain_words(page: Path) -> None:
    text = APART.sub("", prose(page))
    assert not AVOIDED.findall(re.sub(r"`[^`]*`", "", text))


def test_trust_says_of_every_command_what_it_does() -> None:
    table = (ROOT / "docs" / "explanation" / "trust.md").read_text(encoding="utf-8").split("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`([\w-]+)", row)}
    assert named == ENTRIES.keys()


def test_messages_and_help_use_plain_words() -> None:
    """Docstrings of code are for its readers; those of commands are help, and texts with spaces are messages."""
    helps = [entry.help for entry in ENTRIES.values()]
    messages = [text for text in _texts_of_the_source(docstrings=False) if " " in text]
    found = [text for text in (*helps, *messages) if AVOIDED.search(APART.sub("", text))]
    assert not found


def test_every_page_can_be_reached() -> None:
    for page in DOCS:
        if page.name != "index.md":
            of_folder = page.parent / "index.md"
            home = of_folder if of_folder.exists() else ROOT / "docs" / "index.md"
            assert f"({page.relative_to(home.parent)})" in home.read_text(encoding="utf-8"), name_of(page)


_PARTS = ["Promise", "Options", "How it works", "Cost", "When to choose it", "Training"]


def test_every_operation_has_its_section_and_is_found_by_its_name() -> None:
    """In the page's head, in the table of all of them, and in the titles of the site's navigation."""
    sections = operations.sections()
    assert sections.keys() == OPERATIONS.keys()
    pages = {page for page, _ in sections.values()}
    assert pages == set(operations.FOLDER.glob("*.md")) - {operations.FOLDER / "index.md"}
    index = (operations.FOLDER / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| .*?\| \[(\w+)\]\(([\w.#]+)\) \|", index, re.M)
    assert sorted(listed) == sorted((name, f"{page.name}#{name}") for name, (page, _) in sections.items())
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in pages:
        names = [name for name, (where, _) in sections.items() if where == page]
        head = page.read_text(encoding="utf-8").partition("\n## ")[0]
        assert re.findall(r"\[(\w+)\]\(#(\w+)\)", head) == [(name, name) for name in names], page.name
        titles = re.findall(rf'- "\w+: (.*)": {page.relative_to(ROOT / "docs")}$', navigation, re.M)
        assert titles == [", ".join(names)], page.name


@pytest.mark.parametrize("name", OPERATIONS)
def test_sections_of_operations_have_one_shape(name: str) -> None:
    """What one gets, a plan that runs, and the same parts in the same order."""
    _, text = operations.sections()[name]
    head, *parts = re.split(r"^### ", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    assert [part.partition("\n")[0] for part in parts] == _PARTS
    picture = re.escape(f"![{name}: the stack before and after](../../pictures/operations/{name}.svg)")
    assert re.match(rf"## {name}\n\n{picture}\n\nYou get ", head)
    plan, before = next(block for block in blocks_of(text) if block.kind == "yaml"), text.partition("\n### ")[0]
    assert "operations:" in plan.text and plan.text in before
    assert re.search(r"\*(exact|rounding|none)\*", parts[0])
    # The plan reference, which is written from the schema, has every option.
    options = OPERATIONS[name].model_fields.keys() - {"op"}
    assert (f"](../plans.md#{name})" in parts[1]) == bool(options)
    assert options or "None." in parts[1]


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_reference_pages_are_what_the_code_says(name: str) -> None:
    """`python -m tests.reference_pages` writes them."""
    assert (reference_pages.DOCS / name).read_text(encoding="utf-8") == reference_pages.PAGES[name]()


QUOTING = [page for page in DOCS if "<!-- figures: " in page.read_text(encoding="utf-8")]


def test_every_figure_about_forgetting_is_worked_out_of_the_records() -> None:
    """`python -m benchmarks.claims` shows which are not; `python -m tests.quoted` writes the tables."""
    assert [line for line in claims.checked() if line[1]] == []
    for page in QUOTING:
        text = page.read_text(encoding="utf-8")
        assert len(quoted.MARKED.findall(text)) == text.count("<!-- figures: ")
    # What it is there for: another figure, another verdict, a sentence gone, a sentence that names no record.
    sentence = next(each for each in claims.SENTENCES if "a range in common of at least" in each.says)
    assert "the records 0.19, 0.15" in claims.wrong_in(sentence._replace(figures=lambda: ("0.19", "0.15")))
    assert "say otherwise" in claims.wrong_in(sentence._replace(figures=lambda: False))
    assert "stands there 0 times" in claims.wrong_in(sentence._replace(page="README.md"))
    assert claims.untold("docs/index.md", "It forgot 0.2 nats less.\n\n| forgot | 0.3 |\nIt learned.\n") == [
        "It forgot 0.2 nats less."
    ]


def test_every_figure_has_its_page_and_evidence_has_no_other() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in QUOTING}
    assert sorted(name for text in texts.values() for _, name, _ in quoted.MARKED.findall(text)) == sorted(
        quoted.FIGURES
    )
    evidence = texts[ROOT / "docs" / "explanation" / "evidence.md"]
    assert re.findall(r"\d+\.\d+", quoted.MARKED.sub("", evidence)) == []


@pytest.mark.parametrize("name", ["training-file.md", "study-file.md", "tasks-file.md"])
def test_every_key_of_a_file_has_a_meaning(name: str) -> None:
    """Except for keys with one value, such as `kind: task_id`."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .* \| (.*) \|$", reference_pages.PAGES[name](), re.M)
    assert len(rows) > 25
    assert [key for key, kind, meaning in rows if not meaning.strip() and not re.fullmatch(r"`\w+`", kind)] == []


def _texts_of_the_source(*, docstrings: bool = True) -> list[str]:
    """Every string of the package, f-strings with `…` for what is filled in."""
    found: list[str] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        # An expression that is a string alone is a docstring.
        tree = ast.parse(file.read_text(encoding="utf-8"))
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if not docstrings and id(node) in alone:
                continue
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_errors_in_troubleshooting_are_the_sources_own() -> None:
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    # Two backticks around a text that has some itself.
    quoted = [text for _, text in re.findall(r"^\*\*(`+)(.*)\1\*\*<br>$", page, re.M)]
    assert len(quoted) > 25
    source = _texts_of_the_source()
    for text in quoted:
        assert any(text.strip() in known for known in source), text
