"""Exports on the Hugging Face Hub, through the library huggingface_hub, which is optional."""

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.convert.copying.conversion import Conversion
from mcore_rl.convert.hf.folder import ADAPTER_CONFIG, ADAPTER_FILES, INDEX
from mcore_rl.convert.hf.small_files import QUANTIZATION_FILES
from mcore_rl.convert.hf.text_files import TOKENIZER_FILES
from mcore_rl.data.end_tokens import GENERATION_CONFIG
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.metrics.loggers import optional_package
from mcore_rl.metrics.progress import readable_bytes

STALE_FILES = (
    *("model*.safetensors", INDEX, GENERATION_CONFIG),
    *(*TOKENIZER_FILES, *ADAPTER_FILES, *QUANTIZATION_FILES),
)
"""Files of an earlier export that readers would open in place of a new one's, or with it. A push deletes them unless it
has them itself; the history of the repository keeps them.
"""


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A repository of a model on the Hub, which need not exist yet."""

    name: str
    is_public: bool
    """Whether it may be public; else it is made private, and a public one is refused."""

    def check(self, *, needs_token: bool) -> None:
        """Raise a ConfigError without the library or for a name that the Hub does not have; if a token is needed, also
        without a token that the Hub takes, and for a public repository that may not be.
        """
        hub = _library()
        try:
            hub.utils.validate_repo_id(self.name)
        except hub.errors.HFValidationError as error:
            raise ConfigError(
                f"--push-to-hub {self.name} is no name of a repository: {error} Give OWNER/NAME, or NAME for your own."
            ) from None
        if not needs_token:
            return
        if hub.get_token() is None:
            raise ConfigError(
                "--push-to-hub finds no token. Set HF_TOKEN, or log in with `hf auth login`; --dry-run needs none."
            )
        # An export may take hours, and is not to end in a refusal that is known before.
        api = hub.HfApi(library_name="mcore_rl")
        try:
            owner = api.whoami()["name"]
            name = self.name if "/" in self.name else f"{owner}/{self.name}"
            is_fit = self.is_public or api.model_info(name).private
        except hub.errors.RepositoryNotFoundError:
            return  # a push makes it
        except (OSError, hub.errors.HfHubHTTPError, hub.errors.HTTPError) as error:
            raise ConfigError(
                f"--push-to-hub {self.name}: the Hub refuses, or cannot be reached: {error} Correct the token or the "
                "network; or leave --push-to-hub out, and push later with `hf upload`."
            ) from None
        if not is_fit:
            raise ConfigError(
                f"--push-to-hub {name} is public. Add --public to push there, or give another NAME."
            )

    def preview(self, conversion: Conversion) -> Iterator[str]:
        """Yield lines about an export that is only planned: its files with the bytes of their tensors, and the
        repository.
        """
        sizes: Counter[str] = Counter()
        for task in conversion.tasks:
            sizes[task.file] += task.num_bytes
        for file, num_bytes in sorted(sizes.items()):
            yield f"{file}  {readable_bytes(num_bytes)}"
        kind = "public" if self.is_public else "private"
        yield f"and config, tokenizer, index and model card in {conversion.final}"
        yield f"would be pushed to {self.name}, a {kind} repository of a model. Nothing was written or sent."

    def push(self, folder: Path) -> str:
        """Make the repository if it is not there, upload a folder into it in place of an earlier export, and return its
        address.

        Raises:
            CheckpointError: The repository is public and may not be, or the Hub refuses or cannot be reached.
        """
        hub = _library()
        api = hub.HfApi(library_name="mcore_rl")
        again = f"{folder} is complete; to push it later: hf upload {self.name} {shlex.quote(str(folder))}"
        try:
            url: Any = api.create_repo(
                self.name, private=not self.is_public, repo_type="model", exist_ok=True
            )
            if not self.is_public and not api.model_info(url.repo_id).private:
                raise CheckpointError(
                    f"{url} is public. To push there: --public. To another: --push-to-hub NAME. {again}"
                )
            # An adapter is read without the files of a model that may be there.
            is_adapter = (folder / ADAPTER_CONFIG).exists()
            api.upload_folder(
                repo_id=url.repo_id,
                folder_path=folder,
                commit_message="Export by mcore-rl",
                delete_patterns=None if is_adapter else list(STALE_FILES),
            )
        except (OSError, hub.errors.HfHubHTTPError, hub.errors.HTTPError) as error:
            raise CheckpointError(f"the Hub did not take it: {error}. {again}") from None
        return str(url)


def _library() -> Any:
    return optional_package("huggingface_hub", "--push-to-hub", "huggingface_hub")
