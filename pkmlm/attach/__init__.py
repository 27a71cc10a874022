"""A memory in somebody else's network: attached to a causal model of `transformers`, trained, saved and measured there.

attachment: what users see. hosts: what there is in a model. specs: what can be attached. dense: the control. places:
where it is put, and what is attached already. tokens: the tokens of a call. optimizer: AdamW and row Adam as one.
saved: the folder of an attachment. hosted: measuring it. Called by users, and by evaluate.load by name; imports train,
measure, evaluate and everything below.
"""

from pkmlm.attach.attachment import Attachment as Attachment
from pkmlm.attach.attachment import attach as attach
from pkmlm.attach.attachment import attach_dense as attach_dense
