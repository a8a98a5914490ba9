"""The format of a saved task vector: `taskvec.json`, which a person can read, and safetensors beside it.

The JSON lists every parameter's terms and every tensor with its dtype, shape and sha256, and carries a checksum of
itself, so no damage to either file passes unnoticed. Tensors are mapped, and checked when they are first used.

`taskvec.json`, format 1:
    format, library     versions
    provenance          the expression, its weights, the origins of its labels
    parameters          name -> terms: a weight, and a change of some kind over tensors
    tensors             tensor -> file (for a reference: checkpoint and name), dtype, shape, sha256
    checkpoints         for a reference: the folders or Hub ids that the tensors are read from
    discarded           after compression: the share of the squared norm lost, for each parameter
    checksum            sha256 of all of the above
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FORMAT = 1


def checksum(document: Mapping[str, Any]) -> str:
    """The sha256 of all that a `taskvec.json` holds besides its checksum."""
    rest = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
