"""A model of `transformers`, perhaps with memories attached, as what is measured: a `LanguageModel`.

B: sequences; T: positions; D: model width; V: vocabulary.
"""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pkmlm.attach.hosts import block_owner, find_blocks, text_config, vocabulary_of
from pkmlm.attach.places import Attached, attachments_of, insert
from pkmlm.attach.saved import Facts, check_base, read_facts, read_weights, saved_spec
from pkmlm.attach.tokens import CACHES, host_ids
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError, first_line, is_out_of_memory
from pkmlm.evaluate.load import LoadedRun
from pkmlm.export.config import CONFIG, MODEL_TYPE
from pkmlm.export.folder import verify
from pkmlm.files import MANIFEST, read_json
from pkmlm.memory.base import memories
from pkmlm.model.attention import AttentionLayout, KVCache
from pkmlm.recipe.schema import Model, Recipe

CONTEXT = 2048  # most tokens that a model reads at once: the maximum in its config may not fit into memory


class Hosted(nn.Module):
    """A causal `transformers` model with its hidden states and its head apart.

    Args:
        host: the model, perhaps with a memory attached.

    Attributes:
        embedding, blocks, norm: the host's; norm is the identity if no final norm is found.
        token_ids: what the memory attached first needs to know about the tokens, for each sort of ids.

    Raises:
        UserError: its logits are not its output embedding applied to the last hidden state.
    """

    embedding: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module
    token_ids: nn.ModuleDict

    def __init__(self, host: Any):
        super().__init__()
        self.host = host
        config = text_config(host)
        self.context = min(getattr(config, "max_position_embeddings", CONTEXT), CONTEXT)
        blocks, parts = find_blocks(host), list(block_owner(host).children())
        at = parts.index(blocks)
        norms = [each for each in parts[at + 1 :] + parts[:at][::-1] if "norm" in type(each).__name__.lower()]
        norm = norms[0] if norms else nn.Identity()
        found = [each.token_ids for each in attachments_of(host).values() if each.token_ids is not None]
        token_ids = nn.ModuleDict({each.ids: each for each in reversed(found)})
        # Plain attributes: registered as submodules, they would be stored twice.
        self.__dict__.update(embedding=host.get_input_embeddings(), blocks=blocks, norm=norm, token_ids=token_ids)
        named = inspect.signature(type(host).forward).parameters
        self.cache_name = next((name for name in CACHES if name in named), CACHES[0])
        ids_1T = torch.arange(min(8, self.embedding.num_embeddings), device=host.device)[None]
        with torch.no_grad():
            own, whole = self.head(self.hidden(ids_1T)).float(), host(input_ids=ids_1T, use_cache=False).logits.float()
        if not torch.allclose(own, whole, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
            name = type(host).__name__
            raise UserError(f"{name} computes logits from more than its output embedding, which is not supported")

    def hidden(self, tokens_BT: Tensor, cache: KVCache | None = None, layout: AttentionLayout | None = None) -> Tensor:
        """The last hidden state (B, T, D), as `LanguageModel.hidden`, but without a layout."""
        if layout is not None:
            raise ValueError("layout is given (expected None)")
        options: dict[str, Any] = {"use_cache": False}
        past = 0
        if cache is not None:
            from transformers import DynamicCache

            if "host" not in cache.held:
                cache.held["host"] = DynamicCache()
            options, past = {"use_cache": True, self.cache_name: cache.held["host"]}, cache.length
            cache.length += tokens_BT.shape[1]
        mask = tokens_BT.new_ones(len(tokens_BT), past + tokens_BT.shape[1])
        found = self.host.base_model(input_ids=tokens_BT, attention_mask=mask, **options)
        h_BTD: Tensor = found.last_hidden_state
        return h_BTD

    def head(self, h_BTD: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D)."""
        output = self.host.get_output_embeddings()
        logits: Tensor = output(h_BTD.to(output.weight.dtype))
        return logits

    def forward(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits (B, T, V): at each position, of the token after it."""
        return self.head(self.hidden(tokens_BT, cache))


def open_attached(path: Path, base: str | Path | None, device: torch.device) -> LoadedRun:
    """Load an attachment together with the model that it belongs to.

    Args:
        path: a folder that `Attachment.save` wrote.
        base: the model's folder; None: the one recorded in `path`.

    Returns:
        the model, in the dtype that it was trained in, with a recipe of its shape, and the `bos_token_id` of its config
        if that lies within the vocabulary.

    Raises:
        UserError: `base` is not a `transformers` model, or is another one; (exit code 1) a folder is damaged.
    """
    facts = read_facts(path)
    folder = recorded_base(path, facts) if base is None else Path(base)
    host = load_host(folder, facts["base"]["dtype"])
    check_base(path, facts, host)
    host.to(device)
    attached = insert(host, saved_spec(path, facts), facts["layers"], facts["mode"])
    read_weights(path, facts, attached)
    host.eval()
    model, tokenizer = Hosted(host), Tokenizer.load(folder)
    if (ids := attached.token_ids) is not None and not torch.equal(ids.ids_V.cpu(), host_ids(host, ids.ids, tokenizer)):
        message = f"{path}: its {ids.ids} ids are not those that {tokenizer.name} and this Python's Unicode give"
        hint = "put the tokenizer that it was attached with into the model's folder, or use the same Python version"
        raise UserError(message, hint)
    begin = getattr(text_config(host), "bos_token_id", None)
    begin = begin if isinstance(begin, int) and 0 <= begin < vocabulary_of(host) else None
    recipe = Recipe(name=path.resolve().name, model=shape_of(model, attached))
    return LoadedRun(path, facts["step"], 0, recipe, model, tokenizer, device, begin=begin)


def recorded_base(path: Path, facts: Facts) -> Path:
    """The folder of the model that an attachment records."""
    name = facts["base"]["name"]
    if not name or not Path(name).is_dir():
        found = " ".join(filter(None, (facts["base"]["architecture"], name)))
        message = f"{path} is attached to {found}, whose folder was not found"
        raise UserError(message, "give the folder of that model: --base DIR")
    return Path(name)


def shape_of(model: Hosted, attached: Attached) -> Model:
    """The section `model` of a recipe for a network with a memory attached."""
    config = text_config(model.host)
    beside = "+" * (attached.place == "beside")
    spec = replace(attached.spec, layers=tuple(f"{layer}{beside}" for layer in attached.layers))
    return Model(
        vocab_size=model.embedding.num_embeddings,
        dim=config.hidden_size,
        layers=len(model.blocks),
        heads=getattr(config, "num_attention_heads", 1),
        context=model.context,
        memories={attached.name: spec} if memories(attached) else {},
    )


def load_host(path: Path, dtype: str) -> Any:
    """Load a causal model from its folder; no code in the folder is run, and none that its config names is fetched.

    Args:
        dtype: torch's name for it, such as "float32".

    Raises:
        UserError: `transformers` cannot load the folder, or the weights do not fit its config; (exit code 1) it is not
            installed, or an export is damaged.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise UserError("transformers is not installed", "pip install transformers", exit_code=1) from None
    if not (path / CONFIG).is_file():
        raise UserError(f"--base {path} is not a model's folder (no {CONFIG} in it)")
    disable_progress_bar()  # it would show for a second between our own lines
    here = {"local_files_only": True, "trust_remote_code": False}
    facts = read_json(path / CONFIG, "the model's configuration", schema=dict[str, Any])
    kind: Any = AutoModelForCausalLM
    own = facts.get("model_type") == MODEL_TYPE
    if own and (path / MANIFEST).exists():
        verify(path)
    try:
        if own:
            from pkmlm.export.modeling_pkmlm import PkmlmForCausalLM as kind

            config = kind.config_class.from_pretrained(path, **here)
        else:
            config = AutoConfig.from_pretrained(path, **here)
        # transformers' own attention: what the config names may be code on the hub.
        options = {"dtype": getattr(torch, dtype), "output_loading_info": True, **here}
        model, found = kind.from_pretrained(path, config=config, attn_implementation=None, **options)
    except UserError as error:
        raise UserError(f"--base {error.message}", error.hint) from None
    except Exception as error:  # transformers refuses a bad config with many kinds of errors
        if is_out_of_memory(error):
            raise
        reason = first_line(error)
        raise UserError(f"--base {path}: transformers cannot load it: {reason}") from None
    if missing := sorted(found["missing_keys"]):  # transformers would draw them
        raise UserError(f"--base {path}: its weights lack {missing[0]}", "save the whole model there")
    return model
