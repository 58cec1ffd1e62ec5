"""A search over a folder of documents, as a tool of kind "kb": full text with BM25, hits with their source.

The index is SQLite FTS5 in memory, built when the tool is made; it is meant for folders that a person could
have written. Text is cut into passages at blank lines and headings. Words of languages without spaces are
found by the trigram tokenizer, which needs three characters; shorter queries fall back to a plain scan.
"""

from __future__ import annotations

import re
import sqlite3
import weakref
from pathlib import Path

from dualclaw_server.engine.tool import Tool, ToolRaised, tool

SUFFIXES = frozenset({".md", ".txt"})
MAX_BYTES = 16 * 1024 * 1024
"""Of a folder, all documents together."""
MAX_HITS = 5
_MAX_QUERY = 500
_PASSAGE = 1_200
"""Characters of a passage that is not cut further."""
_TRIGRAM = 3


def search_documents(folder: Path, *, name: str = "search_documents") -> Tool:
    """Return a tool that searches the ``.md`` and ``.txt`` files of a folder and its sub-folders.

    Raises:
        ValueError: the folder is missing, has no document, or is larger than MAX_BYTES.
    """
    index = _index(folder)

    @tool(name=name, kind="kb", effect="read", timeout=10)
    def search(query: str) -> str:
        """Search the documents and return the passages that fit best, each with its source.

        Args:
            query: A few words to look for.
        """
        words = re.findall(r"\w+", query[:_MAX_QUERY])
        if not words:
            raise ToolRaised("the query has no words to look for")
        hits = _find(index, words)
        if not hits:
            return f"No document mentions {' '.join(words)}."
        return "\n\n".join(f"[{source}] {title}\n{text}" for source, title, text in hits)

    weakref.finalize(search, index.close)
    return search


def _find(index: sqlite3.Connection, words: list[str]) -> list[tuple[str, str, str]]:
    long = [word for word in words if len(word) >= _TRIGRAM]
    if long:
        # Quoted, a word is nothing but a word; the operators of FTS5 cannot be reached.
        match = " OR ".join(f'"{word}"' for word in long)
        sql = "SELECT source, title, body FROM passages WHERE passages MATCH ? ORDER BY bm25(passages, 0, 2, 1) LIMIT ?"
        return index.execute(sql, (match, MAX_HITS)).fetchall()
    sql = "SELECT source, title, body FROM passages WHERE instr(lower(title || body), lower(?)) LIMIT ?"
    return index.execute(sql, (words[0], MAX_HITS)).fetchall()


def _index(folder: Path) -> sqlite3.Connection:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder of documents")
    paths = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not paths:
        raise ValueError(f"{folder} holds no document; a document ends in {' or '.join(sorted(SUFFIXES))}")
    size = sum(path.stat().st_size for path in paths)
    if size > MAX_BYTES:
        raise ValueError(f"{folder} holds {size} bytes of documents; this search takes up to {MAX_BYTES}")
    # Calls run in threads of their own, one after another on this connection: SQLite serialises them.
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute("CREATE VIRTUAL TABLE passages USING fts5(source UNINDEXED, title, body, tokenize='trigram')")
    for path in paths:
        source = path.relative_to(folder).as_posix()
        text = path.read_text("utf-8", "replace")
        index.executemany(
            "INSERT INTO passages VALUES (?, ?, ?)", [(source, title, body) for title, body in _passages(text)]
        )
    index.commit()
    return index


def _passages(text: str) -> list[tuple[str, str]]:
    """Cut a document into pairs of the heading above and a passage below it."""
    passages: list[tuple[str, str]] = []
    title = body = ""
    for block in re.split(r"\n\s*\n", text):
        heading = re.match(r"#+\s+(.+)", block.strip())
        if heading or len(body) + len(block) > _PASSAGE:
            if body.strip():
                passages.append((title, body.strip()))
            body = ""
        if heading:
            title = heading[1].strip()
            block = block.strip().partition("\n")[2]  # noqa: PLW2901  # what stands below the heading
        body += f"{block}\n\n"
    if body.strip():
        passages.append((title, body.strip()))
    return passages
