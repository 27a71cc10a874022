"""Zero-shot tasks before a model is loaded: their names, definitions and rows; and that no user's file runs code."""

import json
import re

import pytest

from pkmlm.errors import UserError
from pkmlm.evaluate import tasks
from pkmlm.evaluate.task_file import read_task_file
from pkmlm.evaluate.tasks import load_tasks
from tests.conftest import ROOT
from tests.task_rows import ROWS, write_rows

OWN = "task: mine\noutput_type: multiple_choice\ntest_split: test\ndoc_to_choice: [x, y]\ndoc_to_target: a\n"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "tasks")


def refused(names: object, folder=None, fewshot=None) -> UserError:
    with pytest.raises(UserError) as error:
        load_tasks(str(names), folder, fewshot)
    assert "\n" not in error.value.message
    assert error.value.exit_code == 2
    return error.value


def test_a_list_names_each_task_once(rows):
    found = load_tasks(" wsc ,piqa,, memoryformer,piqa", rows, None)
    assert [each.name for each in found] == ["wsc", "piqa", "winogrande", "arc_easy", "arc_challenge", "logiqa"]
    assert found[0].task.config.dataset_name == "wsc.fixed"
    assert [len(each.task.eval_docs) for each in found] == [len(ROWS[each.name]) for each in found]
    assert list(found[1].rows.data) == ROWS["piqa"]


def test_names_that_are_none(rows, tmp_path, monkeypatch):
    for name in ("mmlu", "gsm8k", "squadv2"):  # a group, a task that generates, a program
        assert name in refused(name, rows).message
    refused(",")
    index = tasks.task_manager(["arc_easy"])  # stands for that of all tasks, which takes ten seconds
    monkeypatch.setattr(tasks, "TaskManager", lambda **_: index)
    assert "arc_easy" in refused("arc_esy").hint
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\n")
    (tmp_path / "evil.yaml").write_text(OWN.replace("mine", str(tmp_path)) + "doc_to_text: !function evil.f\n")
    refused(tmp_path, rows)


def test_rows_that_can_be_had_nowhere(rows, tmp_path):
    missing = refused("arc_easy", tmp_path)
    assert f"{tmp_path / 'arc_easy'}.jsonl" in missing.message
    assert 'load_dataset("allenai/ai2_arc", "ARC-Easy", split="test").to_json(' in missing.hint
    assert "load_dataset" not in refused("logiqa", tmp_path).hint, "none of the hub's"
    (tmp_path / "mine.yaml").write_text(OWN + "doc_to_text: q\ndataset_path: owner/data\n")
    for folder in (None, tmp_path):
        assert "mine.jsonl" in refused(tmp_path / "mine.yaml", folder).message
    assert f"{rows / 'arc_easy.train.jsonl'}" in refused("arc_easy", rows, 2).hint
    refused("wsc273", rows, 2)  # but its own questions
    assert load_tasks("wsc273", rows, 0)[0].task.config.num_fewshot == 0


def test_the_task_of_the_manual(tmp_path):
    (example,) = re.findall(r"```yaml\n(task: colours\n[^`]*)```", (ROOT / "pkmlm/manual/evaluation.md").read_text())
    (row,) = re.findall(r'`(\{"thing".*?\})`', (ROOT / "pkmlm/manual/evaluation.md").read_text())
    (tmp_path / "colours.yaml").write_text(example)
    (tmp_path / "colours.jsonl").write_text(row)
    (found,) = load_tasks(str(tmp_path / "colours.yaml"), tmp_path, None)
    assert found.task.doc_to_text(found.task.eval_docs[0]) == "Snow is"


def test_without_a_file_of_rows_the_hub_is_asked(monkeypatch):
    import datasets

    asked = []

    def load_dataset(**options: object) -> None:
        asked.append(options["path"])
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    error = refused("piqa")
    assert asked == ["baber/piqa"]
    assert "hub: ConnectionError: no network" in error.message
    assert "piqa.jsonl" in error.hint


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ("piqa", {"label": 2}, "2"),
        ("piqa", {"label": -1}, "-1"),
        ("piqa", {"goal": None}, "goal"),
        ("piqa", {"sol1": ""}, "empty"),
        ("winogrande", {"sentence": "No gap here."}, "substring"),
        ("wsc", {"label": 2}, "2"),
        ("arc_easy", {"answerKey": "E"}, "'E'"),
        ("arc_challenge", {"choices": {"text": [], "label": []}}, "'A'"),
        ("logiqa", {"options": ["a", "b", "c", None]}, "None"),
        ("copa", {"premise": None}, "None"),
        ("copa", {"label": None}, "label"),
    ],
)
def test_a_bad_row_is_named_by_its_line(task, change, said, tmp_path):
    path = tmp_path / f"{task}.jsonl"
    good = json.dumps(ROWS[task][0])
    path.write_text(f"{good}\n\n{json.dumps({**ROWS[task][0], **change})}\n{good}\n")
    error = refused(task, tmp_path)
    assert error.message.startswith(f"{path}:3: ")
    assert said in error.message


def test_a_row_that_fails_before_it_is_a_question_is_told_with_its_file(tmp_path):
    (tmp_path / "wsc273.jsonl").write_text(json.dumps({**ROWS["wsc273"][0], "options": ["The box"]}))
    assert str(tmp_path / "wsc273.jsonl") in refused("wsc273", tmp_path).message


def test_fields_that_a_task_reads_are_needed(tmp_path):
    unread = {"id", "idx", "span1_index"}
    for task, rows in ROWS.items():
        path = tmp_path / f"{task}.jsonl"
        for field in rows[0].keys() - unread:
            lacking = {key: value for key, value in rows[0].items() if key != field}
            for rest in ("", json.dumps(rows[0])):
                path.write_text(f"{json.dumps(lacking)}\n{rest}")
                assert str(path) in refused(task, tmp_path).message, (task, field, rest)


def test_a_field_that_the_first_row_lacks_is_not_lost(tmp_path):
    rows = [{"q": "A?", "label": 0}, {"q": "B?", "label": 1, "passage": "P."}]
    definition = OWN.replace("doc_to_target: a", "doc_to_target: label")
    (tmp_path / "own.yaml").write_text(definition + "doc_to_text: '{{passage or \"\"}}{{q}}'\n")
    prompts = []
    for ordered in (rows, rows[::-1]):
        (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ordered))
        (loaded,) = load_tasks(str(tmp_path / "own.yaml"), tmp_path, None)
        prompts.append({loaded.task.doc_to_text(row) for row in loaded.task.eval_docs})
    assert prompts == [{"A?", "P.B?"}] * 2


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b'{"goal": "a"', ":1: "),
        (b"\n{}", ""),
        (b"\n[1, 2]", ":2: "),
        (b"\n\xff", ":2: "),
        (b"\n \n", ""),
        (b'{"goal": "\\ud800"}', ""),
        (b'{"label": 0}\n{"label": "0"}', ""),
        (b'{"label": 1000000000000000000000000000000}', ""),
        (b'{"label": [1, "a"]}', ""),
    ],
)
def test_a_broken_file_is_told(content, where, tmp_path):
    path = tmp_path / "piqa.jsonl"
    path.write_bytes(content)
    assert refused("piqa", tmp_path).message.startswith(f"{path}{where}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("- 1", ""),
        ("task: yours", ":6:1: task"),
        ("description: &a Hm.", ":6:14: "),
        ("doc_to_text: !!python/name:os.system", ":6:14: "),
        ("doc_to_text: !function evil.f", ":6:14: "),
        *((f"{key}: evil.f", f":6:1: {key}") for key in ("process_docs", "process_results", "class", "custom_dataset")),
        *((f"{key}: evil.f", f":6:1: {key}") for key in ("use_prompt", "filter_list", "doc_to_image", "unsafe_code")),
        ("a: 1", ":6:1: a"),
        ("metric_list: [{metric: ./evil}]", "metric_list"),
        ("metric_list: [{metric: acc, hf_evaluate: true}]", "metric_list"),
        ("metric_list: [{aggregation: mean}]", "metric_list"),
        ("metric_list: 5", "metric_list"),
        ("metadata: {version: .nan}", "float"),
        ("metadata: 2001-01-01", "date"),
        ('gen_prefix: "\\ud800"', "surrogate"),
        ("metadata: 2001-99-99", "month"),
        ("include: mine.yaml", "includes itself"),
        ("include: [5]", "5"),
        ("include: nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_a_users_file_holds_data_alone(line, said, tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\n")
    (tmp_path / "mine.jsonl").write_text('{"q": "a", "a": 0}\n')
    path = tmp_path / "mine.yaml"
    path.write_text(f"{OWN}{line}\n")
    found = refused(path, tmp_path).message
    assert str(tmp_path) in found
    assert said in found
    (tmp_path / "heir.yaml").write_text("include: mine.yaml\n")
    assert said in refused(tmp_path / "heir.yaml", tmp_path).message


@pytest.mark.parametrize(
    "change",
    [
        {"task": None},
        {"task": "[mine]"},
        {"output_type": None},
        {"output_type": "[1]"},
        {"test_split": None},
        {"test_split": "[test]"},
        {"doc_to_text": None},
        {"doc_to_text": "nowhere"},
        {"doc_to_text": "'{{nowhere}}'"},
        {"doc_to_text": "'{{q'"},
        {"doc_to_text": "1.5"},
        {"doc_to_text": "[q]"},
        {"doc_to_text": "n"},
        {"doc_to_target": None},
        {"doc_to_target": "nowhere"},
        {"doc_to_target": "'{{a * 7 + 2}}'"},
        {"doc_to_choice": None},
        {"doc_to_choice": "nowhere"},
        {"doc_to_choice": "q"},
        {"doc_to_choice": "[]"},
        {"doc_to_choice": "[x, 1]"},
        {"doc_to_choice": "'{{nowhere.split()}}'"},
        {"description": "[1]"},
        {"description": "'{{nowhere}}'"},
        {"target_delimiter": "5"},
        {"gen_prefix": "[1]"},
        {"num_fewshot": "-1"},
        {"num_fewshot": "1.5"},
        {"num_fewshot": "1"},
        {"fewshot_config": "[1]"},
        {"fewshot_config": "{nowhere: 1}"},
        {"metadata": "{1: 2}"},
        {"metric_list": "[{metric: acc, aggregation: nope}]"},
    ],
    ids=str,
)
def test_definitions_that_cannot_be_scored(change, tmp_path):
    """Each is told with its file; none gets a number."""
    (tmp_path / "mine.jsonl").write_text('{"q": "a", "a": 0, "n": 5}\n{"q": "b", "a": 1, "n": 6}\n')
    path = tmp_path / "mine.yaml"
    definition = dict(line.split(": ", 1) for line in f"{OWN}doc_to_text: q".splitlines())
    path.write_text("".join(f"{key}: {value}\n" for key, value in definition.items()))
    assert load_tasks(str(path), tmp_path, None)
    definition |= change
    path.write_text("".join(f"{key}: {value}\n" for key, value in definition.items() if value is not None))
    error = refused(path, tmp_path)
    assert str(tmp_path) in error.message + error.hint


def test_an_error_in_a_row_of_a_users_task_names_both(tmp_path):
    lines = [json.dumps({"q": "a", "a": 0, "d": 1})] * 16 + [json.dumps({"q": "b", "a": 1, "d": 0})]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    path = tmp_path / "mine.yaml"
    for text in ("{{1 // d}}", "{{q}}{{1 / d}}"):
        path.write_text(f'{OWN}doc_to_text: "{text}"\n')
        message = refused(path, tmp_path).message
        assert message.startswith(f"{tmp_path / 'mine.jsonl'}:17: ")
        assert str(path) in message
        assert "ZeroDivisionError" in message


@pytest.mark.parametrize(
    "reach",
    [
        "{{ cycler.__init__.__globals__.os.system('touch RAN') }}",
        "{{ lipsum.__globals__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ '{0.__class__}'.format(q) }}",
        "{% set x = [].append(1) %}",
        "{% include 'RAN' %}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ q | attr('__class__') }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
@pytest.mark.parametrize("key", ["doc_to_text", "doc_to_target", "description", "gen_prefix"])
def test_no_template_runs_code(reach, key, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"q": "a", "a": 0}\n')
    path = tmp_path / "mine.yaml"
    definition = dict(line.split(": ", 1) for line in f"{OWN}doc_to_text: q".splitlines())
    definition[key] = json.dumps(reach.replace("RAN", str(tmp_path / "ran")))
    path.write_text("".join(f"{key}: {value}\n" for key, value in definition.items()))
    refused(path, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_definition_may_include_another_and_null_is_as_good_as_absent(tmp_path):
    (tmp_path / "base.yaml").write_text("description: Hm.\noutput_type: multiple_choice\ntest_split: test\n")
    (tmp_path / "mine.yaml").write_text(
        "include: [base.yaml]\ntask: mine\ndataset_path: csv\ndescription: null\nmetric_list: [{metric: acc}]\n"
    )
    assert read_task_file(tmp_path / "mine.yaml") == {
        "output_type": "multiple_choice",
        "test_split": "test",
        "task": "mine",
        "dataset_path": "csv",
        "metric_list": [{"metric": "acc"}],
    }


def test_a_users_task_may_have_the_name_of_lm_evals(rows, tmp_path):
    path = tmp_path / "piqa.yaml"
    path.write_text(OWN.replace("mine", "piqa").replace("target: a", "target: label") + "doc_to_text: goal\n")
    (found,) = load_tasks(str(path), rows, None)
    assert found.rows.file == rows / "piqa.jsonl"
    assert found.task.doc_to_text(found.task.eval_docs[0]) == ROWS["piqa"][0]["goal"]
    assert "piqa" in refused(f"piqa,{path}", rows).message


@pytest.mark.parametrize("column", ["doc_to_text", "doc_to_target"])
@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_a_column_of_numbers_is_no_text(kind, column, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"n": 5, "q": "a"}\n')
    other = {"doc_to_text": "doc_to_target", "doc_to_target": "doc_to_text"}[column]
    path = tmp_path / "mine.yaml"
    path.write_text(f"task: mine\noutput_type: {kind}\ntest_split: test\n{column}: n\n{other}: q\n")
    assert "mine.jsonl:1: " in (said := refused(path, tmp_path).message)
    assert "5" in said


def test_examples_are_never_the_questions(tmp_path):
    questions = [{"q": f"q{place}", "a": place % 2} for place in range(4)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    path, examples = tmp_path / "mine.yaml", tmp_path / "mine.train.jsonl"
    splits = ("training_split: test", "fewshot_split: dev", "fewshot_config: {split: dev}", "training_split: rows")
    validation = "test_split: null\nvalidation_split: test\nfewshot_split: test"
    for named in ("", *splits, validation):
        own = OWN.replace("test_split: test\n", "") if named == validation else OWN
        path.write_text(f"{own}doc_to_text: q\nnum_fewshot: 2\n{named}\n")
        examples.unlink(missing_ok=True)
        assert str(examples) in refused(path, tmp_path).hint, named
        examples.write_text('{"q": "r", "a": 1}\n{"q": "s", "a": 0}\n')
        (found,) = load_tasks(str(path), tmp_path, None)
        assert [row["q"] for row in found.task.eval_docs] == ["q0", "q1", "q2", "q3"]
        for document in found.task.eval_docs:
            *shown, question = found.task.fewshot_context(document, 2).split("\n\n")
            assert sorted(shown) == ["r y", "s x"]
            assert question == document["q"]
    assert str(examples) in refused(path, tmp_path, 3).hint, "there are two"
    examples.write_text('{"q": "r", "a": 1}\n{"q": "s", "a": 5}\n')
    assert f"{examples}:2: " in refused(path, tmp_path).message


@pytest.mark.parametrize(
    ("named", "others"),
    [("fewshot_split: test", ["q0", "q1", "q2", "q3"]), ('fewshot_config: {samples: [{"q": "r", "a": 1}]}', ["r"])],
)
def test_a_definition_may_hold_its_examples(named, others, tmp_path):
    """With the test split, lm-eval leaves out the question that is asked."""
    questions = [{"q": f"q{place}", "a": 0} for place in range(4)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    path = tmp_path / "mine.yaml"
    path.write_text(f"{OWN}doc_to_text: q\n{named}\n")
    shots = len(others) - (others[0] == "q0")
    (found,) = load_tasks(str(path), tmp_path, shots)
    for document in found.task.eval_docs:
        *shown, question = found.task.fewshot_context(document, shots).split("\n\n")
        assert {line.split()[0] for line in shown} == {*others} - {question}
