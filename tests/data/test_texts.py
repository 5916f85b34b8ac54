import hashlib

import pytest

from manyheads.data.characters import load_text, make_text
from manyheads.errors import FileRefused, UsageError


def test_default_text_is_the_documentation_in_sorted_order():
    from pydoc_data.topics import topics

    text = load_text()
    assert text.content == "".join(page for _, page in sorted(topics.items()))
    assert text.sha256 == hashlib.sha256(text.content.encode()).hexdigest()


def test_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_bytes("Zürich\r\n漢字\n".encode())
    text = load_text(path)
    assert (text.name, text.content) == ("poem.txt", "Zürich\r\n漢字\n")
    assert text.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"", UsageError, "empty"),
        (b" \n\t", UsageError, "empty"),
        (b"caf\xe9", FileRefused, "not UTF-8"),
        (b"PK\x03\x04\x00\x00", FileRefused, "null character"),
    ],
)
def test_unreadable_content_is_refused(tmp_path, content, error, says):
    path = tmp_path / "given"
    path.write_bytes(content)
    with pytest.raises(error, match=says):
        load_text(path)


def test_missing_file_and_folder_are_refused(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            load_text(path)


def test_make_text_refuses_white_space():
    with pytest.raises(UsageError, match="empty"):
        make_text("nothing", "\n")
