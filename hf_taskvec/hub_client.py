"""The Hub's client: each of our requests says which library, of which version, makes it.

What transformers, PEFT and datasets ask for on our behalf bears their names.
"""

from typing import TYPE_CHECKING

from hf_taskvec._version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi

#: what the Hub knows us by: in requests, in cards, and where downloads are counted
LIBRARY_NAME = "hf_taskvec"


def hub_api(token: str | bool | None = None) -> "HfApi":
    """The client of huggingface_hub, in our name."""
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name=LIBRARY_NAME, library_version=__version__)


def hub_headers(token: str | bool | None = None) -> dict[str, str]:
    """The headers of a request that is made without that client."""
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(token=token, library_name=LIBRARY_NAME, library_version=__version__)
