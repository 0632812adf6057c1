"""A domain gate in chats: whether it opens for answers to French turns, and keeps the base's bits for all others.

    python -m benchmarks.gate_chats --base DIR --french FILE --english FILE --work DIR [--steps N] [--recall N]

The base has a chat template. FILEs are JSON lines of documents: the gate is fitted on them and on what the base writes.
The prompts below are only measured. The page goes to benchmarks/results/gate_chats_<base>.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import surgeon
from benchmarks.measuring import machine

RESULTS = Path(__file__).resolve().parent / "results"
# 40 turns of any length, from three words on.
FRENCH = (
    "Comment ça va ?",
    "Bonjour mon ami",
    "Quelle heure est-il ?",
    "Merci beaucoup, à bientôt !",
    "Tu m'entends ?",
    "Raconte une blague.",
    "Pourquoi le ciel est-il bleu ?",
    "Où habites-tu ?",
    "Combien font sept fois huit ?",
    "Je ne comprends pas.",
    "Aide-moi, s'il te plaît.",
    "Qui a peint la Joconde ?",
    "Donne-moi une recette de crêpes.",
    "Quel est le plus long fleuve d'Afrique ?",
    "Écris un poème sur la pluie.",
    "Qu'est-ce que la photosynthèse ?",
    "Explique la gravité à un enfant de six ans.",
    "J'ai mal à la tête depuis ce matin, que dois-je faire ?",
    "Comment installer une imprimante sous Linux ?",
    "Quelle est la différence entre un chat et un chien ?",
    "Peux-tu corriger cette phrase : « ils sont parti hier » ?",
    "Quels livres me conseilles-tu pour les vacances d'été ?",
    "Propose trois titres pour un roman qui se passe à Marseille.",
    "Mon ordinateur ne démarre plus. Que puis-je essayer avant d'appeler un technicien ?",
    "Comment fait-on pour demander un congé parental en France ?",
    "Résume en deux phrases l'histoire du Petit Chaperon rouge.",
    "Je cherche un cadeau pour ma grand-mère qui aime jardiner et lire des romans policiers.",
    "Est-ce que les pingouins savent voler, et sinon pourquoi ont-ils des ailes ?",
    "Dis-moi comment faire cuire un œuf à la coque sans qu'il éclate dans l'eau bouillante.",
    "Mon fils de dix ans n'aime pas les mathématiques. Comment lui donner envie d'apprendre ses tables ?",
    "Rédige un courriel poli pour annuler mon rendez-vous de jeudi chez le dentiste et en demander un autre la semaine"
    " prochaine.",
    "Je voudrais visiter Lyon pendant trois jours avec deux enfants. Quels quartiers, quels musées et quels restaurants"
    " faut-il absolument voir ?",
    "Compare les avantages et les inconvénients du train et de l'avion pour aller de Paris à Barcelone, en tenant"
    " compte du prix, du temps et du climat.",
    "Hier soir, en rentrant du travail, j'ai trouvé un petit oiseau tombé du nid devant ma porte. Il respire mais ne"
    " vole pas. Faut-il le nourrir, le remettre dans l'arbre ou l'apporter à quelqu'un ?",
    "Voici mon problème : mon voisin joue de la batterie tous les soirs jusqu'à minuit. Je lui en ai parlé deux fois,"
    " il s'est excusé, et le lendemain tout recommençait. Que prévoit la loi, et comment rester en bons termes ?",
    "Écris une courte histoire dans laquelle un boulanger découvre que son four parle. Le ton doit être drôle, il faut"
    " au moins un dialogue, et la fin doit surprendre le lecteur.",
    "Quand j'étais petit, mon grand-père me disait toujours que le vent d'est apporte la pluie et que le vent du nord"
    " l'emporte. Est-ce vrai partout, ou seulement dans les montagnes où il vivait ? Explique-moi aussi d'où viennent"
    " les nuages.",
    "Nous préparons le mariage de ma sœur pour le mois de juin. Il y aura quatre-vingts invités, dont une dizaine ne"
    " mangent pas de viande et trois ne supportent pas le gluten. Propose un menu avec entrée, plat, fromage et"
    " dessert, et calcule à peu près les quantités qu'il faudra acheter.",
    "Je dois parler cinq minutes devant ma classe de la Révolution française. Fais-moi un plan avec une introduction,"
    " trois parties et une conclusion. Je voudrais que les dates importantes y soient, mais aussi la vie de tous les"
    " jours : ce que mangeaient les gens, comment ils s'habillaient et pourquoi le pain coûtait si cher cette"
    " année-là.",
    "Depuis que j'ai changé de téléphone, je n'arrive plus à retrouver mes photos. J'avais fait une sauvegarde sur mon"
    " ancien appareil, puis j'ai suivi les étapes indiquées pour tout transférer, mais l'album reste vide. J'ai"
    " redémarré deux fois, vérifié la connexion et libéré de la place. Il ne me reste plus d'idée. Par où commencer, et"
    " comment être sûr de ne rien effacer ?",
)
ENGLISH = (
    "Hi there!",
    "How are you?",
    "Tell me a joke.",
    "What is the capital of France?",
    "Why is the sky blue?",
    "Who was Charles de Gaulle?",
    "Recommend a restaurant in Bordeaux.",
    "Give me a recipe for ratatouille and crème brûlée.",
    "Summarise the plot of Les Misérables.",
    "Write a haiku about autumn leaves.",
    "My name is François Lefèvre and I live in Besançon. What can I do there on a Sunday?",
    "I have 12 apples and give away 5. How many are left?",
    "Explain the difference between a virus and a bacterium to a ten-year-old, in three short paragraphs.",
    "My laptop no longer starts after the update. The fan spins, but the screen stays black. What should I try first?",
    "List five ideas for a birthday party.",
    "Is it rude to call someone in the evening?",
    "Draft a polite email to my landlord about the broken heating, and ask when it will be repaired. It has been cold"
    " for a week, and my daughter is ill.",
)
CODE = (
    "def f(x): return x +",
    "Write a Python function that reverses a string.",
    "What does this do? for (int i = 0; i < n; i++) sum += a[i];",
    "SELECT name, count(*) FROM users GROUP BY name HAVING count(*) > 1;",
    "Fix this error: TypeError: 'NoneType' object is not subscriptable",
    "import os\nfor name in os.listdir('.'):\n    print(name)\n\nAdd a filter for .txt files.",
    "grep -rn 'TODO' src/ | sort -u",
    '<div class="menu"><a href="/home">Home</a></div> How do I centre it?',
    "Explain git rebase --interactive HEAD~3",
    '{"name": "widget", "tags": ["a", "b"], "price": 12.5} Turn this JSON into YAML.',
    "const total = items.reduce((sum, item) => sum + item.price, 0);",
    "docker run -it --rm -v $(pwd):/app python:3.12 bash",
)
TRANSLATION = (
    "Translate into French: Good morning.",
    "Translate into French: Where is the nearest train station?",
    "Translate to French: I would like a coffee with milk and two croissants, please.",
    "How do you say 'thank you' in French?",
    "What does 'bonjour' mean?",
    "What does 'je ne sais quoi' mean in English?",
    "What is the French word for butterfly?",
    "Is 'maison' masculine or feminine?",
    "Translate into English: Le chat dort sur la chaise.",
    "Translate this sentence into English: Je voudrais réserver une table pour deux personnes.",
    "What does the phrase 'il pleut des cordes' mean, and is it still used?",
    "Please translate the following French text into English: Nous sommes arrivés hier soir et il faisait déjà nuit.",
    "Is this correct French: 'Je suis allé au marché' ?",
    "Conjugate the French verb 'aller' in the present tense.",
    "Explain the difference between 'tu' and 'vous'.",
    "Translate into Spanish: The library closes at six.",
    "How do I pronounce 'grenouille'?",
)
GROUPS = {"French": FRENCH, "English": ENGLISH, "code": CODE, "translation": TRANSLATION}
# Asked: the share of French turns whose answer it is open for; of all others the answers have the base's bits.
OPEN = 0.8


def fitted(asked: argparse.Namespace) -> Path:
    """Return the folder of a run in which the gate was fitted, beside copied layers."""
    work = asked.work
    plan, config = work / "plan.yaml", work / "train.yaml"
    operations = [{"op": "insert_layers", "where": {"every": 8}, "init": {"kind": "copy"}}, {"op": "domain_gate"}]
    plan.write_text(json.dumps({"surgeon": 1, "operations": operations}), encoding="utf-8")
    sources = [
        {"name": "fr", "path": str(asked.french.resolve()), "share": 1, "validation": 0.1},
        {"name": "en", "path": str(asked.english.resolve()), "share": 0, "role": "original", "validation": 0.1},
    ]
    settings = {"surgeon_train": 1, "steps": asked.steps, "batch": 4, "micro_batch": 4, "length": 128}
    settings |= {"optimizer": {"lr": 1e-3}, "evaluate_every": asked.steps, "validation_sequences": 8}
    settings |= {"recall_for_gate": asked.recall, "sources": sources}
    config.write_text(json.dumps(settings), encoding="utf-8")
    out, run = work / "out", work / "run"
    if not out.exists():
        surgeon.apply(plan, str(asked.base), out)
    if not run.exists():
        surgeon.train(out, config, run, device="cpu")
    return run


@torch.no_grad()
def answered(model: Any, ids: Tensor, tokens: int) -> tuple[Tensor, Tensor, list[bool]]:
    """Answer greedily over a cache; return the answer's ids, its logits and, per forward, whether the gate is open."""
    opened: list[bool] = []
    gates = [module for name, module in model.named_modules() if name.endswith("domain_gate")]
    hooks = [gate.register_forward_hook(lambda _module, _given, on: opened.append(bool(on[0, -1]))) for gate in gates]
    found = model.generate(
        ids, do_sample=False, max_new_tokens=tokens, output_logits=True, return_dict_in_generate=True
    )
    for hook in hooks:
        hook.remove()
    return found.sequences[0, ids.shape[1] :], torch.stack(found.logits), opened


def measure(asked: argparse.Namespace, run: Path) -> dict[str, dict[str, list[str]]]:
    """Return for each group of prompts those whose answer is open, changed in a bit, and not steadily decided."""
    base, grown = surgeon.open_checkpoint(asked.base), surgeon.open_checkpoint(run)
    models = base.load(), grown.load()
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked.base)
    found: dict[str, dict[str, list[str]]] = {}
    for group, prompts in GROUPS.items():
        found[group] = {"open": [], "changed": [], "unsteady": []}
        for prompt in prompts:
            chat = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            (_, of_base, _), (_, logits, on) = (answered(model, ids, asked.tokens) for model in models)
            same = torch.equal(of_base, logits)
            for key, holds in (("open", on[0]), ("changed", not same), ("unsteady", len(set(on)) > 1)):
                if holds:
                    found[group][key].append(prompt)
    return found


def write(asked: argparse.Namespace, run: Path, found: dict[str, dict[str, list[str]]]) -> None:
    """Write the page of results."""
    gate = json.loads((run / "surgery.json").read_text(encoding="utf-8"))["training"][-1]["gate"]
    french, others = found["French"], [each for group, each in found.items() if group != "French"]
    reached = len(french["open"]) >= OPEN * len(FRENCH) and not any(each["changed"] for each in others)
    lines = [
        f"# A domain gate in chats: {asked.base.name}",
        "",
        f"`python -m benchmarks.gate_chats` ({machine()}, one thread): copied layers behind a gate, fitted on"
        f" `{asked.french.name}` and `{asked.english.name}` and on {asked.recall:,} tokens that the base wrote; trained"
        f" for {asked.steps} steps of 512 tokens. Each prompt is one turn in the base's chat template, answered"
        f" greedily in up to {asked.tokens} tokens. The prompts were written before the"
        " gate's reading of turns, and no fit saw them.",
        "",
        f"Asked: at least {OPEN:.0%} of French turns open, all other answers the base's bit for bit."
        f" {'Reached.' if reached else 'Not reached.'} On held-out documents it is open on {gate['new']:.1%} of French"
        f" and {gate['original']:.1%} of English tokens, and opens after {gate['opens_after']['fr']} tokens of French.",
        "",
        "| turns | open in the answer | every logit of the answer is the base's | decision changes in the answer |",
        "|---|---:|---:|---:|",
    ]
    for group, each in found.items():
        count = len(GROUPS[group])
        shares = len(each["open"]), count - len(each["changed"]), len(each["unsteady"])
        lines.append(f"| {group} | " + " | ".join(f"{share} of {count}" for share in shares) + " |")
    missed = [prompt for prompt in FRENCH if prompt not in french["open"]]
    wrong = [prompt for each in others for prompt in each["changed"]]
    for words, prompts in (("French turns that it stays closed for", missed), ("Others that it opens for", wrong)):
        lines += ["", f"{words}: " + ("; ".join(prompts) if prompts else "none") + "."]
    (RESULTS / f"gate_chats_{asked.base.name}.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


def main() -> None:
    """Fit the gate, answer every prompt, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("base", "french", "english", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, default in (("steps", 20), ("recall", 8192), ("tokens", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.work.mkdir(parents=True, exist_ok=True)
    run = fitted(asked)
    write(asked, run, measure(asked, run))


if __name__ == "__main__":
    main()
