"""What a package index shows: the README, whose links start from the project's address, as an index has no files."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)]+)\)")
PICTURE = re.compile(r'(?<=[ ])(src|srcset)="(?!\w+:)([^"]+)"')


def with_whole_links(text: str, address: str) -> str:
    """The text, where links and pictures that name files of the repository name them at its address."""
    kind = {"": "blob", "!": "raw"}
    text = PICTURE.sub(lambda file: f'{file[1]}="{address}/raw/HEAD/{file[2]}"', text)
    return LINK.sub(lambda link: f"{link[1]}[{link[2]}]({address}/{kind[link[1]]}/HEAD/{link[3]})", text)


class IndexPage(MetadataHookInterface):
    """Called by hatchling, which builds the package."""

    def update(self, metadata: dict) -> None:
        """Writes the readme; where the project has no address yet, its links stay as they are."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        address = metadata.get("urls", {}).get("Source")
        text = with_whole_links(text, address) if address else text
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
