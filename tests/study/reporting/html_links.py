"""Links, ids and fetches of a written page."""

import re
from collections import Counter
from html.parser import HTMLParser


class Links(HTMLParser):
    """Collect ids, references to ids, links, and everything that a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.ids, self.references, self.fetched, self.links, self.tags = [], [], [], [], Counter()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "xlink:href") and value.startswith("#"):
                self.references.append(value[1:])
            elif (tag, name) == ("a", "href"):
                self.links.append(value)
            elif name in ("href", "src", "xlink:href", "action"):
                self.fetched.append(value)
            self.references += re.findall(r"url\(#([^)]+)\)", value or "")


def parsed(path):
    links = Links()
    links.feed(path.read_text())
    return links
