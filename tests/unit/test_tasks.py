"""Names of tasks and where their definitions and rows are found."""

import http.server
import pickle
import re
import socket
import threading
import time

import pytest

from pkmlm.errors import UserError
from pkmlm.evaluate.hub import answers, asked_once
from pkmlm.evaluate.tasks import SUITES, find_tasks, stock
from tests.task_rows import ROWS, write_rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "tasks")


def refused(names: str, folder=None, fewshot=None) -> UserError:
    with pytest.raises(UserError) as error:
        find_tasks(names, folder, fewshot)
    assert "\n" not in error.value.message
    assert error.value.exit_code == 2
    return error.value


def test_a_list_names_each_task_once(rows):
    found = find_tasks(" wsc ,piqa,, memoryformer,piqa", rows, None)
    assert [source.name for source in found] == ["wsc", "piqa", "winogrande", "arc_easy", "arc_challenge", "logiqa"]
    assert SUITES["memoryformer"] == ("piqa", "winogrande", "wsc", "arc_easy", "arc_challenge", "logiqa")
    assert all(source.file == rows / f"{source.name}.jsonl" and not source.hub for source in found)


def test_definitions_are_the_harness_own(rows):
    wsc, arc = find_tasks("wsc,arc_challenge", rows, None)
    assert wsc.config["dataset_name"] == "wsc.fixed"
    assert callable(wsc.config["doc_to_text"])
    assert wsc.splits == ("validation", ["train"])
    assert arc.config["doc_to_target"] == "{{choices.label.index(answerKey)}}"
    assert arc.splits == ("test", ["validation", "train"])


def test_definitions_in_unusual_places_are_found():
    found = stock(["social_iqa", "blimp_adjunct_island", "mmlu_anatomy", "piqa"])
    assert found["social_iqa"].name == "siqa.yaml"
    assert found["piqa"].name == "piqa.yaml"
    assert len(found) == 4


def test_names_that_are_none():
    assert refused("arc_esy").hint.startswith("did you mean arc_easy")
    assert "for example memoryformer, piqa" in refused("%%%%").hint
    assert "is a group of tasks" in refused("mmlu").message
    assert refused(",").message == "--tasks names no task"


def test_tasks_of_other_kinds_are_refused(rows):
    assert "gsm8k is a task of generate_until" in refused("gsm8k", rows).message
    assert "is a program" in refused("squadv2", rows).message


def test_rows_that_can_be_had_nowhere(rows, tmp_path):
    assert "datasets >= 4" in refused("logiqa").message
    assert "DIR/logiqa.jsonl" in refused("logiqa").hint
    assert f"expected {tmp_path / 'piqa'}.jsonl" in refused("piqa", tmp_path).message
    assert find_tasks("piqa", None, None)[0].hub
    assert f"{rows / 'arc_easy.train.jsonl'}" in refused("arc_easy", rows, 2).hint
    assert "no examples for wsc273 but its own questions" in refused("wsc273", rows, 2).message
    assert find_tasks("wsc273", rows, 0)[0].shots is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("task: [mine]\n", ":1:1: task: found a list of 1 (expected a text that is not empty)"),
        ("output_type: multiple_choice\n", "no key 'task'"),
        ("a: 1\n", "no key 'a'"),
        ("- 1\n", "found list"),
        ("task: mine\ntask: yours\n", ":2:1: task is given twice"),
        ("task: &a mine\n", ":1:7: anchors"),
        ("task: !!python/name:os.system\n", ":1:7: tags"),
        ("task: mine\nprocess_results: evil.f\n", "no key 'process_results'"),
        ("task: mine\nuse_prompt: mine.yaml:a\n", "no key 'use_prompt'"),
        ("task: mine\nmetric_list: [{metric: ./evil}]\n", "metric_list: found"),
        ("task: mine\nmetric_list: [{metric: acc, hf_evaluate: true}]\n", "metric_list: found"),
        ("task: mine\nmetric_list: 5\n", "metric_list: found"),
        ("task: mine\nmetadata: 2001-99-99\n", "month"),
        ("task: mine\nclass: evil\n", "is a program"),
        ("include: 5\n", "include: found"),
        ("include: mine.yaml\n", "includes itself"),
        ("task: mine # " + "x" * (1 << 16), "more than"),
        ("task: mine\noutput_type: generate_until\n", "mine is a task of generate_until"),
        ("task: mine\n", "mine is a task of generate_until"),
        ("task: mine\noutput_type: multiple_choice\ndataset_path: json\n", "nothing to score"),
        ("task: mine\noutput_type: multiple_choice\ndataset_path: hub/mine\n", "nothing to score"),
        ("task: {\n", ":2:1: "),
        ("include: nowhere.yaml\ntask: mine\n", "No such file"),
        ('include: "a\\0b.yaml"\ntask: mine\n', "null byte"),
        (
            "task: mine\noutput_type: multiple_choice\ntest_split: test\ndoc_to_text: !function nowhere.f\n"
            "dataset_path: json\n",
            ":4:14: tags",
        ),
    ],
)
def test_definitions_of_ones_own_that_do_not_work(text, said, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert said in refused(str(path)).message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("repeats: -1", "repeats: found -1 (expected 1: "),
        ("repeats: x", "repeats: found x (expected 1: "),
        ("test_split: [x]", "test_split: found a list of 1 (expected a text that is not empty)"),
        ("doc_to_text: [1, 2]", "doc_to_text: found a list of 2 (expected a text)"),
        ('doc_to_text: "\\ud800"', "doc_to_text: found"),
        ("doc_to_target: 1.5", "doc_to_target: found 1.5 (expected a text, or the place of a choice)"),
        ("doc_to_choice: [no, yes]", "doc_to_choice: found a list of 2 (expected a text, or texts"),
        ("doc_to_choice: [a, '']", "doc_to_choice: found a list of 2"),
        ("num_fewshot: -1", "num_fewshot: found -1"),
        ("metadata: {version: 2001-01-01}", "metadata: found a mapping (expected a mapping, its version"),
        ("metadata: {version: .nan}", "metadata: found a mapping"),
        ("metadata: {1: 2}", "metadata: found a mapping"),
        ("should_decontaminate: 5", "should_decontaminate: found 5 (expected true or false)"),
        ("fewshot_config: 5", "fewshot_config: found 5 (expected keys such as sampler, "),
        ("fewshot_config: {sampler: x}", "fewshot_config.sampler: found x (expected default or first_n)"),
        ("fewshot_config: {samples: [1]}", "fewshot_config.samples: found a list of 1"),
        ("fewshot_config: {process_docs: f}", "no key 'fewshot_config.process_docs'"),
        ("dataset_kwargs: {trust_remote_code: true}", "no key 'dataset_kwargs.trust_remote_code'"),
        ("dataset_kwargs: {data_files: 'reference://a::b'}", "dataset_kwargs.data_files: found"),
        ("dataset_kwargs: {data_files: {test: [a, 'http://b']}}", "dataset_kwargs.data_files: found"),
        ("dataset_kwargs: {data_dir: 'hf://a'}", "dataset_kwargs.data_dir: found"),
        ("metric_list: [{metric: acc, aggregation: nope}]", "metric acc: aggregation 'nope' (expected mean or median"),
        ("metric_list: [{metric: acc, aggregation: weighted_perplexity}]", "aggregation 'weighted_perplexity'"),
        ("metric_list: [{metric: f1, aggregation: [mean]}]", "metric f1: aggregation \"['mean']\" (expected f1)"),
    ],
)
def test_values_that_a_key_cannot_hold_are_told_with_their_place(line, said, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"task: mine\n{line}\n")
    told = refused(str(path)).message
    assert said in told
    assert told.startswith(f"{path}:")
    (tmp_path / "heir.yaml").write_text("include: mine.yaml\n")
    assert refused(str(tmp_path / "heir.yaml")).message == told


def test_a_key_that_is_null_is_as_one_that_is_not_there(tmp_path):
    (tmp_path / "base.yaml").write_text("description: Hm.\noutput_type: multiple_choice\ntest_split: test\n")
    (tmp_path / "mine.yaml").write_text(
        "include: base.yaml\ntask: mine\ndataset_path: json\ndescription: null\nrepeats: null\nmetric_list:\n"
    )
    (found,) = find_tasks(str(tmp_path / "mine.yaml"), None, None)
    assert not {"description", "repeats", "metric_list", "include"} & found.config.keys()


def test_only_readers_of_plain_data_and_the_hub_are_accepted(tmp_path, monkeypatch):
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    monkeypatch.chdir(tmp_path)
    (tmp_path / "here/folder").mkdir(parents=True)
    path = tmp_path / "mine.yaml"

    def accepted(source: str) -> bool:
        path.write_text(f"task: mine\noutput_type: multiple_choice\ntest_split: test\ndataset_path: {source}\n")
        try:
            return find_tasks(str(path), None, None)[0].hub == ("/" in source)
        except UserError as error:
            return f"{path}:4:1: dataset_path: found" not in error.message

    safe = {"json", "csv", "text", "parquet"}
    assert safe < _PACKAGED_DATASETS_MODULES.keys()
    assert {name for name in _PACKAGED_DATASETS_MODULES if accepted(name)} == safe
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

    from pkmlm.evaluate.harness import build_tasks

    (tmp_path / "e.pkl").write_bytes(pickle.dumps(Pickled(tmp_path / "ran")))
    path = tmp_path / "mine.yaml"
    path.write_text(
        "task: mine\noutput_type: multiple_choice\ntest_split: test\ndataset_path: pandas\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'e.pkl'}}}}}\n"
    )
    asked: list[object] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **options: asked.append((given, options)))
    with pytest.raises(UserError, match=r"dataset_path: found pandas \(expected json, csv, text, parquet, or"):
        build_tasks(find_tasks(str(path), None, None), None)
    assert not asked
    assert not (tmp_path / "ran").exists()
    pickle.loads((tmp_path / "e.pkl").read_bytes())
    assert (tmp_path / "ran").exists()  # else the file proves nothing


def test_no_definition_and_no_template_runs_code(tmp_path):
    from pkmlm.evaluate.harness import build_tasks

    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n\ndef f(row):\n    return 'x'\n")
    (tmp_path / "mine.jsonl").write_text('{"q": "a", "a": 0}\n')
    path = tmp_path / "mine.yaml"
    text = "task: mine\noutput_type: multiple_choice\ntest_split: test\ndoc_to_choice: [x, y]\ndoc_to_target: a\n"
    for reach in (
        f"cycler.__init__.__globals__.os.system('touch {tmp_path / 'ran'}')",
        "lipsum.__globals__",
        "''.__class__.__mro__",
        "'{0.__class__}'.format(q)",
    ):
        path.write_text(text + f'doc_to_text: "{{{{ {reach} }}}}"\n')
        with pytest.raises(UserError, match=r"unsafe|undefined"):
            build_tasks(find_tasks(str(path), tmp_path, None), None)
    path.write_text(text + "doc_to_text: !function evil.f\n")
    assert "tags" in refused(str(path), tmp_path).message
    (tmp_path / "base.yaml").write_text("doc_to_text: !function evil.f\n")
    path.write_text("include: base.yaml\n" + text)
    assert "base.yaml:1:14: tags" in refused(str(path), tmp_path).message
    assert not (tmp_path / "ran").exists()


def test_a_definition_of_ones_own_may_include_another(tmp_path):
    (tmp_path / "base.yaml").write_text("output_type: multiple_choice\ntest_split: test\ndataset_path: json\n")
    (tmp_path / "mine.yaml").write_text(
        "include: [base.yaml]\ntask: mine\ndataset_path: csv\nmetric_list: [{metric: acc}]\n"
    )
    (found,) = find_tasks(str(tmp_path / "mine.yaml"), None, None)
    assert (found.name, found.config["test_split"], found.config["dataset_path"]) == ("mine", "test", "csv")


def test_files_of_ones_own(rows, tmp_path):
    assert "does not exist" in refused(str(tmp_path / "none.yaml")).message
    path = tmp_path / "piqa.yaml"
    path.write_text("task: piqa\noutput_type: multiple_choice\ntest_split: test\ndataset_path: json\n")
    assert "two tasks named 'piqa'" in refused(f"piqa,{path}", rows).message
    assert find_tasks(str(path), rows, None)[0].file == rows / "piqa.jsonl"
    own = find_tasks(str(path), tmp_path, None)[0]
    assert (own.file, own.hub) == (None, False)
    assert set(ROWS) >= {own.name}


def test_a_definition_of_ones_own_is_checked_on_each_row_whatever_its_name(rows, tmp_path):
    from pkmlm.evaluate.harness import build_tasks

    path = tmp_path / "mine.yaml"
    text = "task: piqa\noutput_type: multiple_choice\ntest_split: test\ndoc_to_choice: [x, y]\ndoc_to_text: goal\n"
    path.write_text(text + 'doc_to_target: "{{label * 7}}"\n')
    told = f"{path} cannot be used with the rows of {rows / 'piqa.jsonl'}: row 2: the answer is 7 "
    with pytest.raises(UserError, match=re.escape(told)):
        build_tasks(find_tasks(str(path), rows, None), None)
    path.write_text(text.replace("[x, y]", '"{{nothing.split()}}"') + "doc_to_target: label\n")
    told = "when the first one is tried: UndefinedError: 'nothing' is undefined"
    with pytest.raises(UserError, match=re.escape(told)):
        build_tasks(find_tasks(str(path), rows, None), None)


def test_a_silent_hub_is_given_up_soon():
    began = time.monotonic()
    assert not answers("http://127.0.0.1:9")
    assert not answers("nonsense")
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes the call and says nothing
        assert not answers(f"http://127.0.0.1:{server.getsockname()[1]}", patience=0.2)
    assert time.monotonic() - began < 5


def test_a_name_that_is_looked_up_for_long_is_given_up(monkeypatch):
    over = threading.Event()

    def slow(*arguments: object) -> list[object]:
        over.wait(20)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    began = time.monotonic()
    assert not answers("http://hub.invalid", patience=0.2)
    assert time.monotonic() - began < 10
    over.set()


@pytest.mark.parametrize(("code", "counts"), [(200, True), (404, True), (502, False)])
def test_an_answer_counts_unless_it_is_a_gateway_that_has_none(code, counts):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(code)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert answers(f"http://127.0.0.1:{server.server_port}") == counts


def test_the_hub_is_not_asked_where_nothing_comes_from_it(monkeypatch):
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    modules = datasets.config, huggingface_hub.constants
    before = [module.HF_HUB_OFFLINE for module in modules]
    with asked_once(False) as offline:
        assert not offline
    with asked_once(True) as offline:
        assert offline
        assert all(module.HF_HUB_OFFLINE for module in modules)
    assert [module.HF_HUB_OFFLINE for module in modules] == before
