"""Skill folders: read on demand, confined to their folder, faults named at once, changes seen at the next run."""

import os
from pathlib import Path

import pytest

from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.interceptor import RunConfig
from dualclaw_server.engine.tool import Tool, ToolContext, ToolRaised
from dualclaw_server.stores.memory import MemoryStore
from dualclaw_server.tools.skills import MAX_BYTES, PAGE, SkillsInterceptor, skill_folder
from dualclaw_server.tools.skills_format import SkillFault, parse_skill
from tests.server.engine.conftest import at_work_with, scripted, turn

from .conftest import Bench


def write(folder: Path, name: str, body: str = "Do it well.", description: str = "Does it.") -> Path:
    """Write a skill and return its folder."""
    skill = folder / name
    skill.mkdir(parents=True, exist_ok=True)
    (skill / "SKILL.md").write_text(f"---\nname: {name}\ndescription: {description}\n---\n\n{body}\n", "utf-8")
    return skill


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two skills; one has files beside it, and a secret lies outside."""
    skills = tmp_path / "skills"
    baking = write(skills, "baking", "Read references/bread.md.", "Bakes bread: use it for dough.")
    (baking / "references").mkdir()
    (baking / "references/bread.md").write_text("面粉", "utf-8")
    write(skills, "cooking")
    (tmp_path / "secret.md").write_text("secret", "utf-8")
    return skills


async def use(tools: tuple[Tool, ...], number: int, **args: object) -> str:
    assert tools[number].problem(args) == ""
    context = ToolContext("t", "s", "r", "c", "call", "key", {}, Bench().trace)
    parts = (await tools[number].call(args, context)).parts
    return parts[0].text if parts else ""


async def test_skills_are_listed_and_read_on_demand(folder: Path) -> None:
    """The model is told names and descriptions; a body comes with the list of its files when it is asked for."""
    tools = skill_folder(folder)
    assert [tool.name for tool in tools] == ["load_skill", "read_skill_file"]
    assert "- baking: Bakes bread: use it for dough.\n- cooking: Does it." in tools[0].description
    assert "references" not in tools[0].description
    loaded = await use(tools, 0, name="baking")
    assert loaded.startswith("Read references/bread.md.\n")
    assert loaded.endswith("- references/bread.md")
    assert await use(tools, 1, name="baking", file="references/bread.md") == "面粉"
    assert (tools[0].kind, tools[0].effect) == ("skill", "read")


async def test_a_folder_may_be_one_skill(folder: Path) -> None:
    """Naming the skill's own folder gives that skill."""
    assert await use(skill_folder(folder / "cooking"), 0, name="cooking") == "Do it well."


@pytest.mark.parametrize(
    "path",
    [
        "../../secret.md",
        "/etc/passwd",
        "references/../../../secret.md",
        "..",
        ".",
        "",
        "a//b",
        "link.md",
        "up/secret.md",
    ],
)
async def test_files_outside_are_refused(folder: Path, path: str) -> None:
    """No absolute path, no "..", no link to a file or folder leads out of a skill."""
    (folder / "baking/link.md").symlink_to(folder.parent / "secret.md")
    (folder / "baking/up").symlink_to(folder.parent)
    with pytest.raises(ToolRaised):
        await use(skill_folder(folder), 1, name="baking", file=path)


async def test_what_is_no_text_file_is_refused(folder: Path) -> None:
    """Pipes do not hang, folders and binary files say what they are, large files are not read."""
    tools = skill_folder(folder)
    os.mkfifo(folder / "baking/pipe")
    (folder / "baking/image.png").write_bytes(b"\x89PNG\xff")
    (folder / "baking/large.md").write_bytes(b"x" * (MAX_BYTES + 1))
    for path, part in (
        ("pipe", "is no file"),
        ("references", "is no file"),
        ("image.png", "is no text"),
        ("large.md", f"at most {MAX_BYTES}"),
        ("none.md", "references/bread.md"),
    ):
        with pytest.raises(ToolRaised, match=part):
            await use(tools, 1, name="baking", file=path)
    with pytest.raises(ToolRaised, match="there are: baking, cooking"):
        await use(tools, 0, name="sewing")


async def test_long_texts_are_read_in_pages(folder: Path) -> None:
    """Every page says where the next begins; together they are the text."""
    body = "".join(f"{number:07d}\n" for number in range(PAGE // 4)).strip()
    write(folder, "cooking", body)
    tools, text, start = skill_folder(folder), "", 0
    while True:
        page = await use(tools, 0, name="cooking", start=start)
        text += page[:PAGE] if "[it goes on" in page else page
        if "[it goes on" not in page:
            break
        start = len(text)
        assert f"start={start};" in page
    assert text == body
    with pytest.raises(ToolRaised, match="nothing begins at"):
        await use(tools, 0, name="cooking", start=len(body))


async def test_changed_texts_are_seen_at_once(folder: Path) -> None:
    """A body is read anew for each call; one that has become unreadable says so."""
    tools = skill_folder(folder)
    write(folder, "cooking", "Better.")
    assert await use(tools, 0, name="cooking") == "Better."
    (folder / "cooking/SKILL.md").write_text("no front matter", "utf-8")
    with pytest.raises(ToolRaised, match="must begin with a line of ---"):
        await use(tools, 0, name="cooking")


def test_every_fault_is_named_at_once(folder: Path) -> None:
    """Whoever makes an agent learns of all broken skills together, with their files."""
    write(folder, "wrong-folder")
    (folder / "wrong-folder").rename(folder / "other")
    (folder / "cooking/SKILL.md").write_text("hello", "utf-8")
    with pytest.raises(ValueError, match=r"cooking/SKILL.md: it must begin .*other/SKILL.md: its name 'wrong-folder'"):
        skill_folder(folder)
    with pytest.raises(ValueError, match="holds no skill"):
        skill_folder(folder / "none")


def skill(front: str) -> str:
    """Return the description a front matter gives."""
    return parse_skill(f"---\nname: a-1\n{front}\n---\nBody", "a-1").description


@pytest.mark.parametrize(
    ("front", "description"),
    [
        ("description: plain: with a colon # and a comment", "plain: with a colon"),
        ('description: "quoted \\"x\\" # no comment"', 'quoted "x" # no comment'),
        ("description: 'it''s'", "it's"),
        ("description: goes on\n  here", "goes on here"),
        ("description: >-\n  folded\n  text\n\n  more", "folded text\nmore"),
        ("description: |\n  kept\n    lines", "kept\n  lines"),
        ("license: MIT\nmetadata:\n  author: x\n  version: '1'\ndescription: d", "d"),
        ("# a comment\nallowed-tools: Read Write\ndescription: 做饭", "做饭"),
    ],
)
def test_front_matter_is_read_as_people_write_it(front: str, description: str) -> None:
    """Plain, quoted and block texts are read; keys of others are passed over."""
    assert skill(front) == description


@pytest.mark.parametrize(
    ("front", "part"),
    [
        ("description:", "1 to 1024 characters, not 0"),
        (f"description: {'x' * 1025}", "not 1025"),
        ('description: "no end', "text of description"),
        ("what is this", "line 3 of its front matter"),
        ("description: a\ndescription: b", "two of description"),
    ],
)
def test_front_matter_that_is_wrong_is_told(front: str, part: str) -> None:
    """The fault says which line or key it is."""
    with pytest.raises(SkillFault, match=part):
        skill(front)


@pytest.mark.parametrize("name", ["A", "a--b", "-a", "a-", "a b", "x" * 65, ""])
def test_names_are_those_of_the_format(name: str) -> None:
    """Names are checked as every other reader of the format checks them."""
    with pytest.raises(SkillFault, match="its name must be"):
        parse_skill(f"---\nname: {name}\ndescription: d\n---\n", name)


async def test_a_run_meets_the_skills_of_its_day(folder: Path) -> None:
    """A skill that is added is told at the next run; one that breaks is left out, and the agent goes on."""
    interceptor = SkillsInterceptor(folder)
    model = scripted(turn(0, {"call": "load_skill", "args": {"name": "sewing"}}), turn(1, {"text": "{{result}}"}))
    config = RunConfig("", (), model, Limits(), None)
    trace = Bench().trace
    assert "sewing" not in (await interceptor.before_agent(trace, config)).tools[0].description
    write(folder, "sewing", "Thread the needle.")
    (folder / "cooking/SKILL.md").write_text("broken", "utf-8")
    listing = (await interceptor.before_agent(trace, config)).tools[0].description
    assert "- sewing: Does it." in listing
    assert "cooking" not in listing
    store = MemoryStore()
    await store.open()
    async with at_work_with(store, [Agent("helper", interceptors=[interceptor], models=[model])]) as engine:
        asked = await engine.ask("sew")
    assert asked.last.done.content == "Thread the needle."
    assert list(asked.last.done.used_skills) == ["load_skill"]
    await store.close()
