from tests.reference_pages import DOCS, PAGES

for name, content in PAGES.items():
    (DOCS / name).write_text(content(), encoding="utf-8")
