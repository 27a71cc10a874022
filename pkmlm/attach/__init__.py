"""A memory in somebody else's network: attached to a causal model of `transformers`, trained, saved and measured there.

`attachment` is what users see, `places` puts layers into a network, `ngrams` finds the tokens of a call, `saved` is the
folder of what is attached, and `hosted` measures it. Called by the commands (through evaluate.load) and by users;
imports train, analysis, evaluate and everything below.
"""

from pkmlm.attach.attachment import Attachment as Attachment
from pkmlm.attach.attachment import attach as attach
from pkmlm.attach.attachment import attach_dense as attach_dense
