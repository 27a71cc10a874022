"""Zero-shot tasks before a model is loaded: their names, definitions and rows; and that no user's file runs code."""

import json
import pickle
import re

import pytest

from pkmlm.errors import UserError
from pkmlm.evaluate.lm_eval import load_tasks
from pkmlm.evaluate.tasks import LOCAL, SUITES, read_task_file
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
    assert SUITES["memoryformer"] == ("piqa", "winogrande", "wsc", "arc_easy", "arc_challenge", "logiqa")
    assert found[0].task.config.dataset_name == "wsc.fixed"
    assert [len(each.task.eval_docs) for each in found] == [len(ROWS[each.name]) for each in found]
    assert found[1].rows.rows == ROWS["piqa"]


def test_names_that_are_none(rows):
    assert refused("arc_esy").hint.startswith("did you mean arc_easy")
    assert "is a group" in refused("mmlu").message
    assert "names no task" in refused(",").message
    assert "gsm8k is a task of generate_until" in refused("gsm8k", rows).message
    assert "is a program" in refused("squadv2", rows).message


def test_rows_that_can_be_had_nowhere(rows, tmp_path):
    assert f"expected {tmp_path / 'piqa'}.jsonl" in refused("piqa", tmp_path).message
    assert f"{rows / 'arc_easy.train.jsonl'}" in refused("arc_easy", rows, 2).hint
    assert "but its own questions" in refused("wsc273", rows, 2).message
    assert load_tasks("wsc273", rows, 0)[0].task.config.num_fewshot == 0


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
    assert "DIR/piqa.jsonl" in error.hint


CHOICES = {"text": ["a", "b"], "label": ["A", "B"]}


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ("piqa", {"label": "0"}, "'0'"),
        ("piqa", {"label": 2}, "the answer is 2"),
        ("piqa", {"label": -1}, "the answer is -1"),
        ("piqa", {"label": None}, "label"),
        ("piqa", {"goal": None}, "goal"),
        ("piqa", {"sol1": " "}, "none blank"),
        ("piqa", {"sol2": ["b"]}, "list"),
        ("piqa", {"goal": "\ud800"}, "surrogates"),
        ("piqa", {"sol1": "same", "sol2": " same"}, "twice"),
        ("winogrande", {"sentence": "No gap here."}, "substring not found"),
        ("winogrande", {"answer": "3"}, "'3'"),
        ("wsc", {"label": "yes"}, "yes"),
        ("wsc273", {"options": ["The box"]}, "IndexError"),
        ("arc_easy", {"answerKey": "E"}, "'E'"),
        ("arc_challenge", {"choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A"}, "two or more"),
        ("arc_easy", {"choices": {"text": ["a", ""], "label": ["A", "B"]}, "answerKey": "A"}, "none blank"),
        ("logiqa", {"label": "e"}, "'e'"),
        ("logiqa", {"options": ["a", "b", "c", None]}, "none blank"),
        ("openbookqa", {"choices": CHOICES, "answerKey": "C"}, "'C'"),
        ("copa", {"question": "why"}, "'why'"),
        ("copa", {"label": None}, "label"),
        ("hellaswag", {"label": ""}, "invalid literal"),
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
            path.write_text(json.dumps(rows[0]) + "\n{}\n")
            assert refused(task, tmp_path).message.startswith(f"{path}:2: "), (task, field)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"goal": "a"', ":1: not valid JSON"),
        (b'{"label": 0, "label": 1}', ":1: the key 'label'"),
        (b"\n[1, 2]", ":2: found a list"),
        (b"\xff", ":1: not UTF-8"),
        (b"\n \n", " holds no rows"),
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
        ("description: &a Hm.", ":6:14: anchors"),
        ("doc_to_text: !!python/name:os.system", ":6:14: tags"),
        ("doc_to_text: !function nowhere.f", ":6:14: tags"),
        ("process_results: evil.f", ":6:1: process_results"),
        ("process_docs: evil.f", ":6:1: process_docs"),
        ("class: evil", ":6:1: class"),
        ("use_prompt: mine.yaml:a", ":6:1: use_prompt"),
        ("custom_dataset: f", ":6:1: custom_dataset"),
        ("filter_list: f", ":6:1: filter_list"),
        ("metric_list: [{metric: ./evil}]", "metric_list.0.metric: found ./evil"),
        ("metric_list: [{metric: acc, hf_evaluate: true}]", "metric_list.0.hf_evaluate"),
        ("metric_list: [{aggregation: mean}]", "metric_list.0: no key 'metric'"),
        ("metric_list: 5", "metric_list: found 5"),
        ("metadata: {version: 2001-01-01}", "metadata.version"),
        ("metadata: {version: .nan}", "metadata.version"),
        ("metadata: 2001-99-99", "month"),
        ("include: 5", ":6:1: include: found 5"),
        ("include: mine.yaml", "includes itself"),
        ("include: nowhere.yaml", "nowhere.yaml"),
        ("repeats: -1", ":6:1: repeats: found -1"),
        ("validation_split: [x]", ":6:1: validation_split: found a list of 1"),
        ("doc_to_text: [1, 2]", ":6:1: doc_to_text: found"),
        ("gen_prefix: 1.5", ":6:1: gen_prefix: found 1.5"),
        ("fewshot_config: {doc_to_choice: [no, yes]}", "fewshot_config.doc_to_choice"),
        ("fewshot_config: {doc_to_target: 1.5}", "fewshot_config.doc_to_target"),
        ("fewshot_config: {sampler: x}", "fewshot_config.sampler: found x"),
        ("fewshot_config: {process_docs: f}", "fewshot_config.process_docs"),
        ("num_fewshot: -1", ":6:1: num_fewshot: found -1"),
        ("should_decontaminate: 5", "should_decontaminate: found 5"),
        ("dataset_kwargs: {trust_remote_code: true}", "dataset_kwargs.trust_remote_code"),
        ("dataset_kwargs: {data_files: 'reference://a::b'}", "dataset_kwargs.data_files"),
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
        ("task: mine\n", "a task of generate_until"),
        ("task: mine\noutput_type: multiple_choice\ndataset_path: json\n", "nothing to score"),
        ("task: mine # " + "x" * (1 << 16), "more than"),
    ):
        path.write_text(text)
        assert said in refused(path).message
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
    assert set(LOCAL) == {"json", "csv", "text", "parquet"}
    assert accepted("owner/name-1.0_x")
    for other in ("generator", "glue", "here", "here/folder", "./owner/name", "../a", "/a", "a/../b", "a/b/c", "a.py"):
        assert not accepted(other), other
    for other in ("hf://datasets/pandas", "http://a/b", f"'{tmp_path}'", "''", "[json]", "5", '"owner/name\\n"'):
        assert not accepted(other), other


class Pickled:
    """What opens a file when it is unpickled."""

    def __init__(self, ran):
        self.ran = ran

    def __reduce__(self):
        return open, (str(self.ran), "w")


def test_a_pickle_is_refused_before_anything_reads_it(tmp_path, monkeypatch):
    import datasets

    (tmp_path / "e.pkl").write_bytes(pickle.dumps(Pickled(tmp_path / "ran")))
    path = tmp_path / "mine.yaml"
    path.write_text(f"{OWN}dataset_path: pandas\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'e.pkl'}}}}}\n")
    asked: list[object] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **options: asked.append((given, options)))
    assert "dataset_path: found pandas" in refused(path).message
    assert not asked
    assert not (tmp_path / "ran").exists()
    pickle.loads((tmp_path / "e.pkl").read_bytes())
    assert (tmp_path / "ran").exists()  # else the file proves nothing


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


def test_a_metric_that_cannot_sum_up_the_rows_is_refused(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"q": "a", "a": 0}\n{"q": "b", "a": 1}\n{"q": "c", "a": 2}\n')
    path = tmp_path / "mine.yaml"
    text = OWN.replace("[x, y]", "[x, y, z]") + "doc_to_text: q\n"
    for metric in ("{metric: f1}", "{metric: acc, aggregation: nope}", "{metric: acc, aggregation: perplexity_of}"):
        path.write_text(f"{text}metric_list: [{metric}]\n")
        assert str(path) in refused(path, tmp_path).message
    path.write_text(f"{text}metric_list: [{{metric: acc, aggregation: median}}]\n")
    assert load_tasks(str(path), tmp_path, None)
