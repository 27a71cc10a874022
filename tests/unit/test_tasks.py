"""Zero-shot tasks before a model is loaded: their names, definitions and rows; and that no user's file runs code."""

import json
import re
import subprocess

import pytest

from pkmlm.errors import UserError
from pkmlm.evaluate import tasks
from pkmlm.evaluate.task_file import LOCAL, read_task_file
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
    assert found[1].rows.rows == ROWS["piqa"]


def test_names_that_are_none(rows, monkeypatch):
    for name in ("mmlu", "gsm8k", "squadv2"):  # a group, a task that generates, a program
        assert name in refused(name, rows).message
    refused(",")
    index = tasks.task_manager(["arc_easy"])  # stands for that of all tasks, which takes ten seconds
    monkeypatch.setattr(tasks, "TaskManager", lambda **_: index)
    assert "arc_easy" in refused("arc_esy").hint


def test_rows_that_can_be_had_nowhere(rows, tmp_path):
    missing = refused("arc_easy", tmp_path)
    assert f"expected {tmp_path / 'arc_easy'}.jsonl" in missing.message
    fetch = 'load_dataset("allenai/ai2_arc", "ARC-Easy", split="test").to_json('
    assert f'from datasets import load_dataset; {fetch}"{tmp_path}/arc_easy.jsonl"' in missing.hint
    assert "pkmlm help evaluation" in refused("logiqa", tmp_path).hint, "none of the hub's"
    assert f"{rows / 'arc_easy.train.jsonl'}" in refused("arc_easy", rows, 2).hint
    assert "but its own questions" in refused("wsc273", rows, 2).message
    assert load_tasks("wsc273", rows, 0)[0].task.config.num_fewshot == 0


def test_the_manuals_task_without_its_rows(tmp_path):
    """The hint is a line that writes one."""
    (example,) = re.findall(r"```yaml\n(task: colours\n[^`]*)```", (ROOT / "pkmlm/manual/evaluation.md").read_text())
    (tmp_path / "colours.yaml").write_text(example)
    (tmp_path / "nowhere.yaml").write_text(example.replace("dataset_path: json\n", ""))
    for folder in (None, tmp_path):
        for definition in ("nowhere.yaml", "colours.yaml"):
            missing = refused(tmp_path / definition, folder)
            assert f"expected {folder or 'DIR'}/colours.jsonl" in missing.message
    (line,) = re.findall("echo .*colours.jsonl", missing.hint)
    subprocess.run(line.replace('"..."', "0"), shell=True, check=True, timeout=20)
    assert json.loads((tmp_path / "colours.jsonl").read_text()) == {"thing": 0, "colour": 0}
    assert len(load_tasks(str(tmp_path / "colours.yaml"), tmp_path, None)[0].rows.rows) == 1


def test_without_a_file_of_rows_the_hub_is_asked(monkeypatch):
    import datasets

    asked = []

    def load_dataset(**options: object) -> None:
        asked.append(options["path"])
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    error = refused("piqa")
    assert asked == ["baber/piqa"]
    assert "from the hub: ConnectionError: no network" in error.message
    assert "piqa.jsonl" in error.hint


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ("piqa", {"label": 2}, "2"),
        ("piqa", {"label": -1}, "-1"),
        ("piqa", {"goal": None}, "goal"),
        ("piqa", {"sol1": " "}, "blank"),
        ("piqa", {"sol2": ["b"]}, "list"),
        ("piqa", {"goal": "\ud800"}, "surrogates"),
        ("piqa", {"sol1": "same", "sol2": " same"}, "twice"),
        ("winogrande", {"sentence": "No gap here."}, "substring"),
        ("wsc", {"label": "yes"}, "yes"),
        ("wsc273", {"options": ["The box"]}, "IndexError"),
        ("arc_easy", {"answerKey": "E"}, "'E'"),
        ("arc_challenge", {"choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A"}, "two"),
        ("logiqa", {"options": ["a", "b", "c", None]}, "blank"),
        ("copa", {"label": None}, "label"),
        ("copa", {"label": 2}, "2"),
    ],
)
def test_a_bad_row_is_named_by_its_line(task, change, said, tmp_path):
    path = tmp_path / f"{task}.jsonl"
    good = json.dumps(ROWS[task][0])
    path.write_text(f"{good}\n\n{json.dumps({**ROWS[task][0], **change})}\n{good}\n")
    error = refused(task, tmp_path)
    assert error.message.startswith(f"{path}:3: ")
    assert said in error.message


def test_fields_that_a_task_reads_are_needed(tmp_path):
    unread = {"id", "idx", "span1_index"}
    for task, rows in ROWS.items():
        path = tmp_path / f"{task}.jsonl"
        for field in rows[0].keys() - unread:
            path.write_text(json.dumps({key: value for key, value in rows[0].items() if key != field}))
            assert refused(task, tmp_path).message.startswith(f"{path}:1: "), (task, field)


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


@pytest.mark.parametrize("value", [10**30, [1, "a"]])
def test_a_field_of_a_lone_row_is_not_compared_with_others(value, tmp_path):
    (tmp_path / "piqa.jsonl").write_text(json.dumps({**ROWS["piqa"][0], "more": value}))
    message = refused("piqa", tmp_path).message
    assert "piqa.jsonl:1: a field cannot be read" in message
    assert "before it" not in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"goal": "a"', ":1: "),
        (b"\n{}", ":2: no row has a field"),
        (b"\n[1, 2]", ":2: "),
        (b"\xff", ":1: "),
        (b"\n \n", " "),
    ],
)
def test_a_broken_file_is_told(content, said, tmp_path):
    path = tmp_path / "piqa.jsonl"
    path.write_bytes(content)
    assert refused("piqa", tmp_path).message.startswith(f"{path}{said}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("- 1", ""),
        ("a: 1", ":6:1: a"),
        ("task: yours", ":6:1: task"),
        ("description: &a Hm.", ":6:14: "),
        ("doc_to_text: !!python/name:os.system", ":6:14: "),
        ("doc_to_text: !function nowhere.f", ":6:14: "),
        ("process_results: evil.f", ":6:1: process_results"),
        ("process_docs: evil.f", ":6:1: process_docs"),
        ("class: evil", ":6:1: class"),
        ("custom_dataset: f", ":6:1: custom_dataset"),
        ("metric_list: [{metric: ./evil}]", "metric_list.0.metric: found ./evil"),
        ("metric_list: [{metric: acc, hf_evaluate: true}]", "metric_list.0.hf_evaluate"),
        ("metric_list: [{aggregation: mean}]", "metric_list.0: no key 'metric'"),
        ("metadata: {version: .nan}", "metadata.version"),
        ("metadata: 2001-99-99", "month"),
        ("include: mine.yaml", "includes itself"),
        ("include: nowhere.yaml", "nowhere.yaml"),
        ("validation_split: [x]", ":6:1: validation_split: found a list of 1"),
        ("fewshot_config: {doc_to_target: 1.5}", "fewshot_config.doc_to_target"),
        ("fewshot_config: {process_docs: f}", "fewshot_config.process_docs"),
        ("num_fewshot: -1", ":6:1: num_fewshot: found -1"),
        ("dataset_kwargs: {trust_remote_code: true}", "dataset_kwargs.trust_remote_code"),
        ("dataset_kwargs: {data_files: {test: [a, 'http://b']}}", "dataset_kwargs.data_files"),
        ("dataset_kwargs: {data_dir: 'hf://a'}", "dataset_kwargs.data_dir"),
    ],
)
def test_a_users_file_holds_data_alone(line, said, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"{OWN}{line}\n")
    found = refused(path, tmp_path).message
    assert str(tmp_path) in found
    assert said in found
    (tmp_path / "heir.yaml").write_text("include: mine.yaml\n")
    assert said in refused(tmp_path / "heir.yaml", tmp_path).message


def test_definitions_without_what_scoring_needs(tmp_path):
    path = tmp_path / "mine.yaml"
    for text, said in (
        ("output_type: multiple_choice\n", "no key 'task'"),
        ("task: mine\n", "output_type generate_until"),
        ("task: mine\noutput_type: multiple_choice\ndataset_path: json\n", "nothing to score"),
        ("task: mine\noutput_type: loglikelihood_rolling\ntest_split: test\n", "'doc_to_text'"),
        (OWN.replace("doc_to_choice", "doc_to_text").replace("[x, y]", "q"), "'doc_to_choice'"),
        (f"{OWN}doc_to_text: q\n".replace("mine", "m" * 300), "m" * 100),
        ("task: mine # " + "x" * (1 << 16), "more than"),
    ):
        path.write_text(text)
        assert said in refused(path, tmp_path).message
    assert "none.yaml" in refused(tmp_path / "none.yaml").message


def test_only_readers_of_plain_data_and_the_hub_are_accepted(tmp_path, monkeypatch):
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    monkeypatch.chdir(tmp_path)
    (tmp_path / "here/folder").mkdir(parents=True)
    path = tmp_path / "mine.yaml"

    def accepted(source: str) -> bool:
        path.write_text(f"task: mine\ndataset_path: {source}\n")
        try:
            return bool(read_task_file(path))
        except UserError as error:
            return f"{path}:2:1: dataset_path: found" not in error.message

    assert {name for name in _PACKAGED_DATASETS_MODULES if accepted(name)} == set(LOCAL)
    assert set(LOCAL) == {"json", "csv", "text", "parquet"}, "none of which unpickles, or runs a script"
    assert accepted("owner/name-1.0_x")
    for other in ("generator", "glue", "here", "here/folder", "./owner/name", "../a", "/a", "a/../b", "a/b/c", "a.py"):
        assert not accepted(other), other
    for other in ("hf://datasets/pandas", "http://a/b", f"'{tmp_path}'", "''", "[json]", "5", '"owner/name\\n"'):
        assert not accepted(other), other


def test_no_template_runs_code(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"q": "a", "a": 0}\n')
    path = tmp_path / "mine.yaml"
    for reach in (
        f"cycler.__init__.__globals__.os.system('touch {tmp_path / 'ran'}')",
        "lipsum.__globals__",
        "''.__class__.__mro__",
        "'{0.__class__}'.format(q)",
    ):
        path.write_text(OWN + f'doc_to_text: "{{{{ {reach} }}}}"\n')
        assert re.search("unsafe|undefined", refused(path, tmp_path).message)
    path.write_text(OWN + 'doc_to_text: q\ndescription: "{{ [].__class__ }}"\n')
    assert "mine.jsonl:1: SecurityError" in refused(path, tmp_path).message
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


def test_a_definition_is_checked_on_each_row_whatever_its_name(rows, tmp_path):
    path = tmp_path / "piqa.yaml"
    text = OWN.replace("mine", "piqa").replace("doc_to_target: a\n", "") + "doc_to_text: goal\n"
    path.write_text(text + "doc_to_target: label\n")
    assert load_tasks(str(path), rows, None)[0].rows.file == rows / "piqa.jsonl"
    assert "two tasks named 'piqa'" in refused(f"piqa,{path}", rows).message
    path.write_text(text + 'doc_to_target: "{{label * 7}}"\n')
    assert f"{path} cannot be used with {rows / 'piqa.jsonl'}:2: the answer is 7 " in refused(path, rows).message
    path.write_text(text.replace("[x, y]", '"{{nothing.split()}}"') + "doc_to_target: label\n")
    assert "'nothing' is undefined" in refused(path, rows).message


@pytest.mark.parametrize("column", ["doc_to_text", "doc_to_target"])
@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_a_column_of_numbers_is_no_text(kind, column, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"n": 5, "q": "a"}\n')
    other = {"doc_to_text": "doc_to_target", "doc_to_target": "doc_to_text"}[column]
    path = tmp_path / "mine.yaml"
    path.write_text(f"task: mine\noutput_type: {kind}\ntest_split: test\n{column}: n\n{other}: q\n")
    assert "mine.jsonl:1: " in (said := refused(path, tmp_path).message)
    assert "'5'" in said


def test_a_metric_that_cannot_sum_up_the_rows_is_refused(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"q": "a", "a": 0}\n{"q": "b", "a": 1}\n{"q": "c", "a": 2}\n')
    path = tmp_path / "mine.yaml"
    text = OWN.replace("[x, y]", "[x, y, z]") + "doc_to_text: q\n"
    for metric in ("{metric: acc, aggregation: weighted_perplexity}", "{metric: acc, aggregation: nope}"):
        path.write_text(f"{text}metric_list: [{metric}]\n")
        assert str(path) in refused(path, tmp_path).message
    path.write_text(f"{text}metric_list: [{{metric: acc, aggregation: median}}]\n")
    assert load_tasks(str(path), tmp_path, None)
