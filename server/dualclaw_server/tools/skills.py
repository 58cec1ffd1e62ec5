"""Skill folders: instructions an agent reads when it needs them, and the files beside them.

    Agent("helper", tools=skill_folder(Path("skills")))                  # skills as they are now
    Agent("helper", interceptors=[SkillsInterceptor(Path("skills"))])    # and as they are at each run

Rules

- A skill is a folder with a SKILL.md (``skills_format``). The model is told names and descriptions; the body is read
  when it calls ``load_skill``, other files when it calls ``read_skill_file``. What a file says is told as it is at
  that moment.
- A file is named by its path inside of the skill's folder and nothing else: no absolute path, no "..", no symbolic
  link at any place of it, checked while it is opened, so that nothing can change in between. Only regular text files
  of bounded size are read, a page at a time.
- Nothing is run. ``allowed-tools`` of a skill gives no permission here.
- What is wrong with a folder is told at once, every skill of it, when the tools are made. A skill that breaks later
  is left out, and the log says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from dualclaw_server.engine.interceptor import Interceptor, RunConfig
from dualclaw_server.engine.texts import Locale
from dualclaw_server.engine.tool import Tool, ToolRaised
from dualclaw_server.engine.trace import Trace
from dualclaw_server.tools.skills_format import SkillFault, SkillText, parse_skill

log = logging.getLogger(__name__)

MAX_SKILLS = 200
MAX_FILES = 200
"""Files of a skill that are listed; others can be read all the same."""
MAX_BYTES = 1024 * 1024
"""Of one file."""
PAGE = 12_000
"""Characters told at once; less than what is kept of a tool's result."""
_FILE = "SKILL.md"


@dataclass(frozen=True, slots=True)
class _Texts:
    load: str
    name: str
    read: str
    path: str
    start: str
    files: str
    more: str


_TEXTS: Mapping[Locale, _Texts] = MappingProxyType(
    {
        "en": _Texts(
            load="Read the instructions of a skill before you do what it is for. Skills:",
            name="Name of the skill.",
            read="Read a file that belongs to a skill, as its instructions say.",
            path="Path inside of the skill, such as references/details.md.",
            start="First character to read; 0 is the beginning.",
            files="Files of this skill, for read_skill_file:",
            more="[it goes on: call again with start={start}; {count} characters in all]",
        ),
        "zh": _Texts(
            load="在执行技能所针对的任务之前，先阅读该技能的说明。技能列表：",
            name="技能名称。",
            read="按照技能说明读取属于该技能的文件。",
            path="技能内的路径，例如 references/details.md。",
            start="从第几个字符开始读取；0 表示开头。",
            files="该技能的文件（用 read_skill_file 读取）：",
            more="[未完：请以 start={start} 再次调用；共 {count} 个字符]",
        ),
    }
)


def skill_folder(path: Path, *, locale: Locale = "en") -> tuple[Tool, ...]:
    """Return the tools ``load_skill`` and ``read_skill_file`` for the skills in a folder.

    Args:
        path: a folder of skills, or of one skill.
        locale: language the model is told in.

    Raises:
        ValueError: there is no skill, or some have faults; names every one of them.
    """
    skills, faults = _scan(path)
    if faults:
        raise ValueError("; ".join(faults))
    return _tools(path, skills, locale)


class SkillsInterceptor(Interceptor):
    """Gives an agent the skills of a folder as they are when a run begins.

    Args:
        path: a folder of skills, or of one skill.
        locale: language the model is told in.
        name: unique within an agent.

    Raises:
        ValueError: as ``skill_folder``.
    """

    def __init__(self, path: Path, *, locale: Locale = "en", name: str = "skills", order: int = 0) -> None:
        super().__init__(name=name, order=order)
        self._path = path
        self._locale = locale
        self._tools = skill_folder(path, locale=locale)
        self._state = _state(path)

    async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
        """Add the tools, made anew when something in the folder has changed."""
        state = await asyncio.to_thread(_state, self._path)
        if state != self._state:
            skills, faults = await asyncio.to_thread(_scan, self._path)
            for fault in faults:
                log.error("%s; it is left out", fault)
            self._tools, self._state = _tools(self._path, skills, self._locale), state
        return replace(config, tools=(*config.tools, *self._tools))


def _tools(path: Path, skills: Mapping[str, SkillText], locale: Locale) -> tuple[Tool, ...]:
    texts = _TEXTS[locale]
    if not skills:
        return ()

    def load_skill(name: str, start: int = 0) -> str:
        folder = _folder_of(path, name)
        try:
            body = parse_skill(_read(folder, _FILE), folder.name).body
        except SkillFault as fault:
            raise ToolRaised(f"skill {name} cannot be read now: {fault}") from None
        files = [f"- {file}" for file in _files(folder) if file != _FILE]
        listed = ["", texts.files, *files] if files and not start else []
        return "\n".join([_page(body, start, texts), *listed])

    def read_skill_file(name: str, file: str, start: int = 0) -> str:
        return _page(_read(_folder_of(path, name), file), start, texts)

    listing = "\n".join(f"- {skill.name}: {' '.join(skill.description.split())}" for skill in skills.values())
    named = {"type": "string", "description": texts.name}
    place = {"type": "string", "description": texts.path}
    first = {"type": "integer", "minimum": 0, "description": texts.start}
    return (
        Tool(
            "load_skill",
            f"{texts.load}\n{listing}",
            _object({"name": named, "start": first}, ["name"]),
            load_skill,
            effect="read",
        ),
        Tool(
            "read_skill_file",
            texts.read,
            _object({"name": named, "file": place, "start": first}, ["name", "file"]),
            read_skill_file,
            effect="read",
        ),
    )


def _object(properties: Mapping[str, object], required: list[str]) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _page(text: str, start: int, texts: _Texts) -> str:
    """Return a page of a text. Raises ToolRaised when there is none."""
    if start and start >= len(text):
        raise ToolRaised(f"it has {len(text)} characters, so nothing begins at {start}")
    page = text[start : start + PAGE]
    return page if start + PAGE >= len(text) else f"{page}\n{texts.more.format(start=start + PAGE, count=len(text))}"


# The folder


def _folders(path: Path) -> list[Path]:
    if (path / _FILE).exists():
        return [path.resolve()]
    try:
        return sorted(folder for folder in path.iterdir() if (folder / _FILE).exists())
    except OSError:
        return []


def _scan(path: Path) -> tuple[dict[str, SkillText], list[str]]:
    """Return the skills of a folder by name, and what is wrong with the others."""
    folders = _folders(path)
    faults = [] if folders else [f"{path} holds no skill, a folder with a {_FILE}"]
    if len(folders) > MAX_SKILLS:
        faults.append(f"{path} holds {len(folders)} skills; at most {MAX_SKILLS} are taken")
    skills = {}
    for folder in folders[:MAX_SKILLS]:
        try:
            skill = parse_skill(_read(folder, _FILE), folder.name)
            skills[skill.name] = skill
        except (SkillFault, ToolRaised) as fault:
            faults.append(f"skill {folder / _FILE}: {fault}")
    return skills, faults


def _state(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Return something that is another thing once a skill has come, gone or changed."""
    found = []
    for folder in _folders(path):
        with contextlib.suppress(OSError):
            status = (folder / _FILE).stat()
            found.append((folder.name, status.st_mtime_ns, status.st_size))
    return tuple(found)


def _folder_of(path: Path, name: str) -> Path:
    folders = {folder.name: folder for folder in _folders(path)}
    if name not in folders:
        raise ToolRaised(f"there is no skill {name[:100]!r}; there are: {', '.join(folders) or 'none'}")
    return folders[name]


def _files(folder: Path) -> list[str]:
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            whole = Path(place, name)
            if not name.startswith(".") and not whole.is_symlink():
                found.append(whole.relative_to(folder).as_posix())
        if len(found) >= MAX_FILES:
            break
    return found[:MAX_FILES]


def _read(folder: Path, path: str) -> str:
    """Return the text of a file inside of a folder. Raises ToolRaised, saying why not."""
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or "\0" in path or {"", ".", ".."} & set(parts):
        raise ToolRaised(f"{path[:200]!r} is no path inside of the skill; use one such as references/details.md")
    try:
        with _opened(folder, parts) as file:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise ToolRaised(f"{path[:200]} is no file")
            if status.st_size > MAX_BYTES:
                raise ToolRaised(f"{path[:200]} has {status.st_size} bytes; at most {MAX_BYTES} are read")
            with os.fdopen(os.dup(file), "rb") as stream:
                content = stream.read(MAX_BYTES + 1)
    except OSError:
        listed = ", ".join(_files(folder)[:20])
        raise ToolRaised(f"{path[:200]!r} cannot be read; files there are: {listed}") from None
    try:
        return content[:MAX_BYTES].decode("utf-8")
    except UnicodeDecodeError:
        raise ToolRaised(f"{path[:200]} is no text") from None


@contextlib.contextmanager
def _opened(folder: Path, parts: list[str]) -> Iterator[int]:
    """Open a file step by step, following no link below the folder."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number, part in enumerate(parts, 1):
            # Without O_NONBLOCK a named pipe would hold up whoever opens it.
            kind = os.O_NONBLOCK if number == len(parts) else os.O_DIRECTORY
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=place)
            os.close(place)
            place = inner
        yield place
    finally:
        os.close(place)
