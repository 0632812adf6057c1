"""The screenshots in docs/how-to/verifying.md: of the report on a small base that is grown and trained three times.

`python docs/pictures/report.py BASE NEW KNOWN` (it needs Chromium and Pillow) writes report-*.png beside this file.
BASE is a small Llama of eight layers; NEW and KNOWN are JSON lines with `text`: code to learn, and text that it knows.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import surgeon  # noqa: E402
from tests import browser  # noqa: E402

PLANS = (
    "  - {op: insert_layers, where: top_half, init: {kind: ot_fusion}}\n",
    "  - {op: control_llm, layers: [1, 4]}\n  - {op: gated_adapters, size: 32}\n",
    "  - {op: pmoe_experts, slots: 4, threshold: 4, rank: 4}\n",
)
TRAINING = """\
surgeon_train: 1
steps: 40
batch: 8
length: 64
evaluate_every: 5
dtype: float32
optimizer: {lr: 0.001}
validation_sequences: 32
sources:
  - {name: code, path: code.jsonl, share: 1.0, validation: 0.05}
  - {name: docs, path: docs.jsonl, share: 0.0, role: original, validation: docs.jsonl}
"""
# Each picture: the section that it begins with (none: the top), width, height, dark.
SHOTS = {
    "wide-light": ("", 1400, 1250, False),
    "phone-dark": ("", 390, 1500, True),
    "routing": ("routing", 1240, 700, False),
    "learning": ("curves", 1240, 800, True),
}


def make_page(base: Path, new: Path, known: Path, folder: Path) -> str:
    """Make the output and the report in `folder`."""
    for name, file in (("code", new), ("docs", known)):
        shutil.copyfile(file, folder / f"{name}.jsonl")
    (folder / "train.yaml").write_text(TRAINING, encoding="utf-8")
    state = base
    for number, operations in enumerate(PLANS):
        plan = folder / "plan.yaml"
        plan.write_text(f"surgeon: 1\noperations:\n{operations}", encoding="utf-8")
        grown = surgeon.apply(plan, state, folder / f"grown-{number}").path
        surgeon.train(grown, folder / "train.yaml", folder / f"trained-{number}", device="cpu")
        before, state = state, folder / f"trained-{number}"
    texts = {name: folder / f"{name}.jsonl" for name in ("docs", "code")}
    surgeon.report(state, html=folder / "page.html", base=before, texts=texts, device="cpu")
    return (folder / "page.html").read_text(encoding="utf-8")


def main() -> None:
    """Make the page and photograph it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        page = make_page(*map(Path, sys.argv[1:4]), folder)
        for name, (section, width, height, dark) in SHOTS.items():
            shown = page
            if section:
                # What stands above is left out.
                shown = page.replace("</head>", "<style>header { display: none }</style></head>")
                start, at = shown.index('<main id="main">') + 16, shown.index(f'<section id="{section}"')
                shown = shown[:start] + shown[at:]
            browser.photograph(shown, folder / "shot.png", width=width, height=height, dark=dark)
            with Image.open(folder / "shot.png") as shot:
                shot.crop((0, 0, width, height)).save(Path(__file__).with_name(f"report-{name}.png"))


if __name__ == "__main__":
    main()
