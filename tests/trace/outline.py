"""A page as its elements, for tests."""

from __future__ import annotations

from html.parser import HTMLParser


class Outline(HTMLParser):
    """tags: every start tag with its attributes, in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._texts: list[tuple[str, str | None, str]] = []
        self._open: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append((tag, dict(attrs).get("class")))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag, name = self._open[-1] if self._open else ("", None)
        self._texts.append((tag, name, data))

    def within(self, tag: str, name: str | None = None) -> str:
        """All text directly within elements of this tag and exactly this class."""
        return "".join(text for t, n, text in self._texts if (t, n) == (tag, name))

    def having(self, attribute: str) -> list[dict[str, str | None]]:
        """The attributes of every element that has this one."""
        return [attributes for _, attributes in self.tags if attribute in attributes]
