"""Rows of zero-shot tasks, invented for the tests: the fields of the real ones, not their text."""

import json
from pathlib import Path
from typing import Any

LETTERS = ["A", "B", "C", "D"]


def arc(question: str, texts: list[str], answer: str, labels: list[str] = LETTERS) -> dict[str, Any]:
    return {"id": question[:8], "question": question, "choices": {"text": texts, "label": labels}, "answerKey": answer}


ROWS: dict[str, list[dict[str, Any]]] = {
    "piqa": [
        {"goal": "dry a wet coat", "sol1": "hang it by the fire", "sol2": "hang it in the rain", "label": 0},
        {"goal": "keep tea warm", "sol1": "put ice in the pot", "sol2": "put a cloth on the pot", "label": 1},
        {"goal": "light a dark room", "sol1": "close the eyes", "sol2": "open the curtains", "label": 1},
        {"goal": "climb", "sol1": "use the ladder " * 30, "sol2": "use the spoon", "label": 0},
        {"goal": "carry water", "sol1": "take a pail", "sol2": "take a sieve", "label": 0},
    ],
    "winogrande": [
        {"sentence": "The cup fell off the shelf and _ broke.", "option1": "the cup", "option2": "it", "answer": "1"},
        {"sentence": "Jane thanked Emma because _ had helped.", "option1": "Jane", "option2": "Emma", "answer": "2"},
    ],
    "wsc": [
        {
            "text": "Henry called to Robert , but he did not answer .",
            "span1_index": 3,
            "span2_index": 6,
            "span1_text": "Robert",
            "span2_text": "he",
            "idx": 0,
            "label": 1,
        },
        {
            "text": "The old man gave the boy a coin because he was kind .",
            "span1_index": 4,
            "span2_index": 9,
            "span1_text": "the boy",
            "span2_text": "he",
            "idx": 1,
            "label": 0,
        },
        {
            "text": "Anna wrote to Mary before she left .",
            "span1_index": 3,
            "span2_index": 5,
            "span1_text": "Mary",
            "span2_text": "she",
            "idx": 2,
            "label": 0,
        },
    ],
    "wsc273": [
        {
            "text": "The box does not go through the door because it is too wide.",
            "pronoun": "it",
            "pronoun_loc": 45,
            "options": ["The box", "The door"],
            "label": 0,
        }
    ],
    "arc_easy": [
        arc("What falls from clouds?", ["rain", "stones", "fire", "wool"], "A"),
        arc("What gives light at night?", ["the sea", "the moon", "the soil"], "2", ["1", "2", "3"]),
        arc("Which animal flies?", ["the cow", "the fish", "the horse", "the crow"], "D"),
    ],
    "arc_challenge": [
        arc("Why does ice float?", ["it is lighter than water", "it is salt", "it is warm", "it is old"], "A")
    ],
    "logiqa": [
        {
            "label": "b",
            "context": "All clerks have pens. Tom is a clerk.",
            "question": "What follows?",
            "options": ["Tom has no pen", "Tom has a pen", "Tom has two pens", "Tom sells pens"],
        }
    ],
    "openbookqa": [
        {
            "id": "7",
            "question_stem": "A horse drinks",
            "choices": {"text": ["water", "sand", "glass", "smoke"], "label": LETTERS},
            "answerKey": " A",  # the task takes no notice of the space
        }
    ],
    "copa": [
        {
            "premise": "The lamp went out.",
            "choice1": "The room grew dark.",
            "choice2": "The room grew large.",
            "question": "effect",
            "idx": 0,
            "label": 0,
        },
        {
            "premise": "The dog barked.",
            "choice1": "It was asleep.",
            "choice2": "A stranger came.",
            "question": "cause",
            "idx": 1,
            "label": 1,
        },
    ],
    "boolq": [{"passage": "Snow is white.", "question": "is snow black", "label": 0}],
    "sciq": [
        {
            "question": "What do bees make?",
            "distractor1": "silk",
            "distractor2": "wool",
            "distractor3": "wax paper",
            "correct_answer": "honey",
            "support": "Bees fly from flower to flower.",
        }
    ],
    "hellaswag": [
        {
            "activity_label": "Baking",
            "ctx_a": "A man opens the oven.",
            "ctx_b": "he",
            "endings": ["takes out the bread.", "takes out the sea.", "sings to a hat.", "is a loaf."],
            "label": "0",
        }
    ],
    "lambada_openai": [{"text": "She went to the window and opened the window"}],
    "wikitext": [{"page": " = The Mill = \n\n The mill stood by the river , and its wheel was old . \n"}],
}


def write_rows(folder: Path, *tasks: str) -> Path:
    """A folder with TASK.jsonl for each task (all, if none is named)."""
    folder.mkdir(exist_ok=True)
    for task in tasks or ROWS:
        lines = "".join(json.dumps(row) + "\n" for row in ROWS[task])
        (folder / f"{task}.jsonl").write_text(lines)
    return folder
