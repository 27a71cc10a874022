"""A run in lm-evaluation-harness: the adapter that answers its three kinds of requests, and the scores of tasks."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from statistics import fmean, stdev
from typing import Any, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from pkmlm import __version__
from pkmlm.distributed import current_world
from pkmlm.errors import NotFinite, UserError, is_out_of_memory
from pkmlm.evaluate.generate import Sampling, generate, stream_text
from pkmlm.evaluate.likelihood import Window, build_prefix_trees, continuation_windows, score_trees
from pkmlm.evaluate.load import LoadedRun, load_run
from pkmlm.evaluate.perplexity import BATCH, score_windows, windows
from pkmlm.evaluate.tasks import Json, ZeroShotTask, contained, one_line
from pkmlm.model.transformer import Transformer
from pkmlm.recipe.constraints import require_softmax
from pkmlm.runs.results import average_accuracy

TOKENS = {"cpu": 2048, "cuda": 1 << 15}  # of a forward pass, if no batch size is given
Row = TypeVar("Row")
Result = TypeVar("Result")


class PkmLM(TemplateLM):
    """A run as `lm_eval` sees it.

    A context and its continuation are encoded together. A request that is longer than the model's context loses its
    beginning (counted in `truncated`). As in lm-eval's own models, only an empty context is replaced by the token that
    begins a document. Choices that share a prefix are read together (see likelihood.py). Ranks take turns at the
    batches, and each gets every result, so that lm_eval sees a single process. Every rank generates the same texts.

    Attributes:
        requests, truncated: how many requests each task made, and how many of them were cut.
        spanning: in how many of them a token spans the join of context and continuation.
        batch_size: rows of a forward pass; None: as many as `TOKENS` allows. A row is a question with its choices.
    """

    def __init__(
        self,
        run: str | LoadedRun,
        step: str | int = "latest",
        batch_size: int | str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        base: str | None = None,
        advance: Callable[[int, int], Any] = lambda done, total: None,
    ):
        """Load a run ("run=PATH,step=best" among `--model_args`), or take a loaded one.

        Args:
            batch_size: None, "auto" or "auto:N": by the number of tokens. Halved if memory runs out.
            device: None, or CUDA where there is none (lm_eval's default): the device that `pkmlm eval` would use.
            max_batch_size: accepted because lm_eval passes it; not used.
            base: see `load_run` ("run=FOLDER,base=DIR" among `--model_args`).
            advance: called with the tokens that this process has scored so far, and in all.
        """
        super().__init__()
        chosen = torch.device(device) if device else None
        if chosen and chosen.type == "cuda" and not torch.cuda.is_available():
            chosen = None
        self.run = run if isinstance(run, LoadedRun) else load_run(run, str(step), chosen, base)
        self.batch_size = None if batch_size is None or str(batch_size).startswith("auto") else int(batch_size)
        self.advance = advance
        self.requests: Counter[str] = Counter()
        self.truncated: Counter[str] = Counter()
        self.spanning: Counter[str] = Counter()
        self._device = self.run.device
        self._max_tokens = math.inf  # limit of a forward pass, once a larger one has run out of memory

    @property
    def eot_token_id(self) -> int:
        return self.run.prefix

    @property
    def max_length(self) -> int:
        return self.run.model.context

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval keeps with its results."""
        weights = next(self.run.model.parameters())
        return {"run": self.run.name, "step": self.run.step, "model_dtype": str(weights.dtype)}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.run.tokenizer.encode(string)

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each (context, continuation): the sum of log p of the continuation, and whether it is the greedy one."""
        encoded = []
        for request in requests:
            before, continuation, spanning = self._encode_joined(*request.args)
            encoded.append((request.args, before, continuation))
            task = request.task_name or ""
            self.requests[task] += 1
            self.truncated[task] += len(before) + len(continuation) > self.max_length + 1
            self.spanning[task] += spanning
        return self._loglikelihood_tokens(encoded)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of a context and of what follows it, see `_encode_joined`."""
        return self._encode_joined(context, continuation)[:2]

    def _encode_joined(self, context: str, continuation: str) -> tuple[list[int], list[int], bool]:
        """The ids of a context and of what follows it, from the encoding of both together; and whether tokens span the
        join: these are scored as part of the continuation.

        White space at the end of the context belongs to the continuation, as in lm-eval. Where tokens span the join,
        lm-eval's own models score something else: all but as many tokens as the context has by itself.
        """
        whole = self.tok_encode(context + continuation)
        before = self.tok_encode(context.rstrip())
        shared = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        return whole[:shared] or [self.prefix_token_id], whole[shared:], shared < len(before)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        owners: list[int] = []
        found: list[Window] = []
        for index, (_, before, continuation) in enumerate(requests):
            new = continuation_windows(before, continuation, self.max_length)
            owners += [index] * len(new)
            found += new
        # Trees need a mask, which only softmax attention takes; whether a model of transformers takes it is not known.
        trees_fit = self.run.recipe.model.attention == "softmax" and type(self.run.model) is Transformer
        max_tokens = 2 * self.max_length if trees_fit else 0
        trees = sorted(build_prefix_trees(found, max_tokens), key=lambda tree: (-len(tree.tokens), tree.windows[0]))
        most = TOKENS[self.run.device.type]
        plan = batches(trees, lambda tree: self.batch_size or max(1, most // len(tree.tokens)))
        scored_N2 = torch.zeros(len(found), 2, dtype=torch.float64)
        for window, score in self._run(plan, partial(score_trees, self.run.model), lambda tree: len(tree.tokens)):
            scored_N2[window] = torch.tensor(score, dtype=torch.float64)
        results = [(0.0, True) for _ in requests]
        for owner, (value, greedy) in zip(owners, self._from_all(scored_N2).tolist(), strict=True):
            results[owner] = (results[owner][0] + value, results[owner][1] and bool(greedy))
        for (key, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The sum of log p of each whole text, in the windows and batches of `pkmlm eval`."""
        found: list[tuple[int, Window]] = []
        for owner, request in enumerate(requests):
            self.requests[request.task_name or ""] += 1
            ids = self.run.tokenizer.encode_array(request.args[0])
            found += [(owner, each) for each in windows(ids, self.prefix_token_id, self.max_length, self.max_length)]

        def score(group: list[tuple[int, Window]]) -> Iterator[tuple[int, torch.Tensor]]:
            nll = score_windows(self.run.model, [window for _, window in group])
            return zip((owner for owner, _ in group), nll, strict=True)

        sums_N = torch.zeros(len(requests), dtype=torch.float64)
        plan = batches(found, lambda each: self.batch_size or BATCH)
        for owner, nll in self._run(plan, score, lambda each: len(each[1].tokens)):
            sums_N[owner] -= nll.sum()
        results: list[float] = self._from_all(sums_N).tolist()
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def _from_all(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores of all ranks: the sum of tensors that hold a rank's own scores and zeros elsewhere."""
        scores = current_world().all_sum(scores)
        if not bool(scores.isfinite().all()):
            raise NotFinite(f"the scores of {self.run.name} at step {self.run.step} are not finite", exit_code=1)
        return scores

    def _run(
        self, plan: list[list[Row]], score: Callable[[list[Row]], Iterable[Result]], tokens: Callable[[Row], int]
    ) -> Iterator[Result]:
        """The results of this rank's share of the batches."""
        own = plan[current_world().rank :: current_world().size]
        total, done = sum(tokens(row) for batch in own for row in batch), 0
        for batch in own:
            with torch.no_grad():
                results = self._score(batch, score, tokens)
            yield from results
            done += sum(map(tokens, batch))
            self.advance(done, total)

    def _score(
        self, batch: list[Row], score: Callable[[list[Row]], Iterable[Result]], tokens: Callable[[Row], int]
    ) -> list[Result]:
        """Score a batch; if memory runs out, score it in halves and keep all later forward passes smaller."""
        longest = max(map(tokens, batch))
        if len(batch) == 1 or len(batch) * longest <= self._max_tokens:
            try:
                return list(score(batch))
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if len(batch) == 1:
                    message = f"not enough memory to score {longest:,} tokens at a time"
                    raise UserError(message, exit_code=1) from None
            self._max_tokens = len(batch) * longest // 2
        half = (len(batch) + 1) // 2
        return self._score(batch[:half], score, tokens) + self._score(batch[half:], score, tokens)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its `until` strings (left out) or `max_gen_toks` tokens."""
        require_softmax(self.run.recipe.model, self.run.name, "generate")
        results = []
        for request in requests:
            results.append(self._generate(*request.args))
            self.cache_hook.add_partial("generate_until", request.args, results[-1])
        return results

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
        sampling = Sampling(temperature, options.get("top_k") or None, options.get("top_p"))
        ids = self.tok_encode(context) or [self.prefix_token_id]
        size = self.run.tokenizer.size
        drawn = generate(self.run.model, ids, sampling, int(options.get("max_gen_toks", 256)), size)
        text = ""
        for piece in stream_text(self.run.tokenizer, ids, drawn):
            text += piece
            if any(stop in text for stop in stops):
                break
        return min((text.split(stop, 1)[0] for stop in stops), key=len, default=text)


def batches(rows: Sequence[Row], batch_size: Callable[[Row], int]) -> list[list[Row]]:
    """Cut rows into batches, in order; `batch_size` maps the first row of a batch to its number of rows."""
    found: list[list[Row]] = []
    for row in rows:
        if found and len(found[-1]) < batch_size(found[-1][0]):
            found[-1].append(row)
        else:
            found.append([row])
    return found


def score_tasks(
    run: LoadedRun,
    tasks: Sequence[ZeroShotTask],
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    advance: Callable[[int, int], Any] = lambda done, total: None,
) -> tuple[Json, list[Json]]:
    """Score tasks.

    Args:
        limit: score only the first so many documents of each task; None: all.
        batch_size: questions per forward pass; None: by their length.
        advance: called with the tokens scored so far and in all.

    Returns:
        the part of the record that is about tasks: "tasks" (see `task_record`), "average_acc" (see `average_accuracy`)
        and "harness" (versions and how the model ran); and the samples: a dict for each document of each task, with
        what was asked, the log-likelihoods and the metrics.

    Raises:
        UserError: scores that are not finite (exit code 1); rows or a definition that lm-eval cannot score.
    """
    model = PkmLM(run, batch_size=batch_size, advance=advance)
    try:
        with contained():
            found = evaluate(model, {"tasks": {each.name: each.task for each in tasks}}, limit=limit, bootstrap_iters=0)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # in metrics: the requests have been checked
        given = ", ".join(f"{each.own or each.name} with {each.rows.file}" for each in tasks if each.rows is not None)
        if not given:
            raise
        raise UserError(f"--tasks: lm-eval cannot score {given}: {one_line(error)}") from error
    assert found is not None  # lm_eval returns None on ranks above 0; the adapter's is always 0
    records = {}
    for each in tasks:
        name = each.name
        records[name] = {
            **task_record(each.task, found["results"][name], found["samples"][name]),
            "requests": model.requests[name],
            "truncated": model.truncated[name],
            "spanning": model.spanning[name],
            "num_fewshot": each.task.config.num_fewshot or 0,
            "version": found["versions"][name],
            "data": None if each.rows is None else {"file": each.rows.file.name, "sha256": each.rows.sha256},
        }
    record = {
        "tasks": records,
        "average_acc": average_accuracy(records.values())[0],
        "harness": {
            "versions": {"pkmlm": __version__, **{name: version(name) for name in ("lm_eval", "datasets", "torch")}},
            "dtype": str(next(run.model.parameters()).dtype).removeprefix("torch."),
            "device": str(run.device),
            "context": run.model.context,
            "batch_size": batch_size or "auto",
            "limit": limit,
            "processes": current_world().size,
        },
    }
    return record, [{"task": each.name, **sample} for each in tasks for sample in found["samples"][each.name]]


def task_record(task: ConfigurableTask, results: Json, samples: Sequence[Json]) -> Json:
    """What is reported about a task.

    Keys: n (documents), acc, acc_norm (shares of right answers, by the choice with the largest log p or with the
    largest log p per character), their standard errors (of a mean over documents), chance (acc of a random choice),
    always (acc of giving each choice as the only answer, if all documents have the same choices), metrics (the task's
    other finite metrics). None if a key does not apply to the task.
    """
    metrics = {
        key.removesuffix(",none"): value
        for key, value in results.items()
        if "," in key and "_stderr" not in key and isinstance(value, int | float) and math.isfinite(value)
    }
    chance = always = None
    if task.OUTPUT_TYPE == "multiple_choice":
        counts = [len(sample["arguments"]) // (1 + ("acc_mutual_info" in sample["metrics"])) for sample in samples]
        chance = fmean(1 / count for count in counts)
        choices = task.config.doc_to_choice
        if isinstance(choices, list):
            right = [sample["target"] for sample in samples]
            always = {choice: fmean(each in (place, choice) for each in right) for place, choice in enumerate(choices)}
    return {
        "n": len({sample["doc_id"] for sample in samples}),
        "acc": metrics.pop("acc", None),
        "acc_stderr": standard_error([sample.get("acc") for sample in samples]),
        "acc_norm": metrics.pop("acc_norm", None),
        "acc_norm_stderr": standard_error([sample.get("acc_norm") for sample in samples]),
        "chance": chance,
        "always": always,
        "metrics": metrics,
    }


def standard_error(values: Sequence[Any]) -> float | None:
    """The standard error of a mean; None for fewer than two values, or if one is not a number."""
    if len(values) < 2 or not all(isinstance(value, int | float) for value in values):
        return None
    return stdev(values) / math.sqrt(len(values))
