"""What the keys of a recipe are called elsewhere (transformers, nanoGPT, torchtitan and others), for hints."""

from collections.abc import Sequence

# By the end of a dotted key: other names, without the underscores.
OTHER_NAMES = {
    "data.dir": "path paths folder folders train trainfile datadir datapath dataset tokens tokenizer",
    "model.vocab_size": "vocab nvocab vocabulary vocabularysize",
    "model.dim": "hiddensize hiddendim dmodel nembd nembed embeddim embeddingdim embeddingsize width modeldim hidden",
    "model.layers": "numhiddenlayers nlayer nlayers numlayers depth blocks nblocks numblocks",
    "model.heads": "numattentionheads nhead nheads numheads attentionheads",
    "model.kv_heads": "numkeyvalueheads nkvheads numkvheads nkvhead kvhead",
    "model.context": "maxpositionembeddings blocksize seqlen seqlength sequencelength maxseqlen maxlength maxlen "
    "contextlength contextsize npositions nctx ctx window",
    "model.positions": "pos rope rotary positionembeddings positionalencoding positionembeddingtype",
    "model.rotary_base": "ropetheta theta ropebase",
    "model.rotary_fraction": "rotarypct partialrotaryfactor ropefraction",
    "model.norm": "normtype normalization rmsnorm layernorm",
    "model.ffn": "activation act activationfunction hiddenact mlp mlptype mlpactivation",
    "model.ffn_dim": "ffnhidden ffnhiddendim ffnsize intermediatesize dff ninner mlpratio mlpdim feedforwarddim",
    "model.bias": "usebias attentionbias qkvbias mlpbias",
    "model.tie_embeddings": "tiewordembeddings tied tieweights tieembedding weighttying",
    "model.residual": "parallelresidual useparallelresidual parallel",
    "model.dropout": "attentiondropout residdropout embddropout attndropout attnpdrop residpdrop embdpdrop dropoutrate",
    "model.init": "initializerrange initstd initialization",
    "model.memories": "memory memorylayer pkm ngram ngrams hash token peer productkey flatkey engram values",
    "num_keys": "slots nslots memsize nkeys numslots",
    "topk": "k knn",
    "optim.lr": "learningrate maxlr peaklr baselr",
    "optim.muon.lr": "muonlr matrixlr matriceslr muonlearningrate learningrate",
    "optim.muon.momentum": "muonmomentum",
    "optim.matrices": "optimizer optimiser algorithm algo type usemuon",
    "optim.betas": "beta1 beta2 adambeta1 adambeta2 adambetas",
    "optim.eps": "epsilon adameps adamepsilon",
    "optim.schedule": "scheduler lrscheduler lrschedule lrschedulertype",
    "optim.warmup_steps": "warmup warmupiters warmupratio numwarmupsteps",
    "optim.final_lr": "minlr endlr minlrratio lrmin",
    "optim.decay_steps": "cooldown cooldownsteps decay decayiters lrdecayiters",
    "optim.weight_decay": "wd adamwd",
    "optim.clip": "gradclip gradclipping maxgradnorm gradnorm clipgradnorm clipnorm maxnorm gradientclipval",
    "train.steps": "maxsteps maxiters numsteps iterations iters numtrainsteps trainingsteps totalsteps numiterations",
    "train.epochs": "numepochs nepochs maxepochs numtrainepochs",
    "train.batch_tokens": "batchsize globalbatchsize totalbatchsize batch tokensperbatch tokensperstep trainbatchsize",
    "train.micro_batch": "batchsize microbatchsize perdevicebatchsize perdevicetrainbatchsize devicebatchsize "
    "localbatchsize gradaccum gradientaccumulationsteps gradaccumsteps accumulation microbatches",
    "train.precision": "dtype fp16 bf16 amp mixedprecision",
    "train.compile": "torchcompile",
    "train.recompute": "gradientcheckpointing activationcheckpointing checkpointing",
    "train.init_from": "checkpoint pretrained loadfrom initfromcheckpoint resumefrom",
    "every": "interval freq frequency steps iters",
    "eval.every": "evalevery evalinterval evalsteps validateevery valinterval valevery",
    "eval.tokens": "evaliters evaltokens batches",
    "eval.patience": "earlystopping",
    "eval.sample": "prompt sampleprompt",
    "checkpoint.every": "saveevery saveinterval savesteps checkpointevery checkpointinterval",
    "checkpoint.keep": "keeplast keeplatestk savetotallimit maxtokeep",
    "log.every": "logevery loginterval loggingsteps printevery",
    "log.wandb": "wandbproject wandblog project",
}


def known_by(name: str, section: str, keys: Sequence[str]) -> list[str]:
    """Of dotted keys, those that are called `name`, here in another section or elsewhere: those of its own section
    first, if there are any.

    Args:
        name: without a section and underscores, in lower case.
        section: where it was found, dotted.
    """
    ends = [end for end, names in OTHER_NAMES.items() if name in names.split()]
    found = [key for end in ends for key in keys if f".{key}".endswith(f".{end}")]
    own = [key for key in found if key.rpartition(".")[0] == section]
    same = [key for key in keys if key.rpartition(".")[2].replace("_", "") == name]
    return [*own, *same, *([] if own else found)]
