"""What mkdocs asks while it builds the site: pages that are in no file of docs/, and their links."""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tests.site.pages import REFERENCES, linked, pages


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of the repository into those of the site."""
    place = page.file.src_uri
    return markdown if place in REFERENCES else linked(markdown, place)
