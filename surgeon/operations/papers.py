"""Which papers an operation comes from, as BibTeX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """One entry of a bibliography; `arxiv` is empty where there is no preprint."""

    key: str
    authors: str
    title: str
    year: int
    arxiv: str = ""
    venue: str = ""

    @property
    def bibtex(self) -> str:
        """The entry."""
        fields = {"author": self.authors, "title": f"{{{self.title}}}", "year": str(self.year)}
        if self.arxiv:
            fields |= {"eprint": self.arxiv, "archivePrefix": "arXiv", "url": f"https://arxiv.org/abs/{self.arxiv}"}
        kind = "misc"
        if self.venue:
            kind, fields["booktitle"] = "inproceedings", self.venue
        return "\n".join([f"@{kind}{{{self.key},", *(f"  {name} = {{{text}}}," for name, text in fields.items()), "}"])


_OPT_DEUS = Paper(
    "cao2025progressive",
    "Cao, Mingzi and Wang, Xi and Aletras, Nikolaos",
    "Progressive Depth Up-scaling via Optimal Transport",
    2025,
    "2508.08011",
)


_LLAMA_PRO = Paper(
    "wu2024llama",
    "Wu, Chengyue and Gan, Yukang and Ge, Yixiao and Lu, Zeyu and Wang, Jiahao and Feng, Ye and Shan, Ying"
    " and Luo, Ping",
    "LLaMA Pro: Progressive LLaMA with Block Expansion",
    2024,
    "2401.02415",
)


_SOLAR = Paper(
    "kim2023solar",
    "Kim, Dahyun and others",
    "SOLAR 10.7B: Scaling Large Language Models with Simple yet Effective Depth Up-Scaling",
    2023,
    "2312.15166",
)


_CONTROL_LLM = Paper(
    "wei2025control",
    "Wei, Haichao and Ren, Yunxiang and Fu, Zhoutong and Lunia, Aman and Chen, Yi-Lin and Leung, Alice and Xu, Ya",
    "Control LLM: Controlled Evolution for Intelligence Retention in LLM",
    2025,
    "2501.10979",
)


_NEUTRAL_RESIDUES = Paper(
    "signetalla2024neutral",
    r"Signe Talla, Franck and Grave, {\'E}douard and J{\'e}gou, Herv{\'e}",
    "Neutral Residues: Revisiting Adapters for Model Extension",
    2024,
    "2410.02744",
)


_PMOE = Paper(
    "jung2024pmoe",
    "Jung, Min Jae and Kim, JooHee",
    "PMoE: Progressive Mixture of Experts with Asymmetric Transformer for Continual Learning",
    2024,
    "2407.21571",
)


_MIXTURE_OF_CONTROL = Paper(
    "nguyen2026mixture",
    "Nguyen, Duc Anh and Luu, Tien Ngoc and Pham, Tung and Tran, Toan",
    "Mixture-of-Control: State-Aware Fine-Tuning for Transformer-based Models",
    2026,
    venue="ICML Workshop on Connecting Low-rank Representations in AI (CoLoRAI)",
)


_OF_OPERATIONS: Mapping[str, Paper] = {
    "stack_layers": _SOLAR,
    "control_llm": _CONTROL_LLM,
    "merge_branches": _CONTROL_LLM,
    "gated_adapters": _NEUTRAL_RESIDUES,
    "pmoe_experts": _PMOE,
    "mixture_of_control": _MIXTURE_OF_CONTROL,
}


def papers_of(operations: Iterable[str], inits: Iterable[str]) -> list[Paper]:
    """The papers behind a surgery's operations; `inits` say how its new layers of `insert_layers` were filled."""
    found: list[Paper] = []
    for operation in operations:
        if operation == "insert_layers":
            copied = {init.startswith("copy") for init in inits}
            found += [paper for kind, paper in ((True, _LLAMA_PRO), (False, _OPT_DEUS)) if kind in copied]
        elif operation in _OF_OPERATIONS:
            found.append(_OF_OPERATIONS[operation])
    return list(dict.fromkeys(found))
