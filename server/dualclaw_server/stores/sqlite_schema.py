"""The tables of a SQLite store, as the steps that lead from one version of the file to the next.

A step is never changed once released: a file of any older version goes through the later steps, in one
transaction, when it is opened. ``user_version`` counts the steps a file has seen.

Reasons for the layout:
- ``frames`` is written in the order of commits, whatever run they belong to, so one transaction of 64 runs
  touches few pages; its index gives each run its order back. Frames without events are not kept: they only
  move ``heads``.
- ``heads`` is what every append changes, and nothing else, so that many of its rows share a page.
- Bodies above 256 KiB are in ``blobs``, by their hash, counted: equal ones are stored once.
- ``work`` has one row per run that is to be delivered. ``ready`` is when it may be claimed: its time if
  nobody holds it (token NULL), else the end of the lease. So one index finds both. ``lease`` is its length, and
  ``warned`` says that it has ended once and its holder was given time for another beat.
- ``answers`` remembers which interrupts have their answer, apart from the inbox that brings it to the run: its
  key is what lets exactly one of two approvers win.
- ``messages.visible`` says that people see it, from park or end on; never of one with a ``scope``.
- ``runs.rested`` is when a run became final, until its log was compacted: the queue of what retention may drop.
- Ids are never used again (AUTOINCREMENT): a message may outlive its run.
- Times: microseconds since the epoch in INTEGER, seconds in REAL.
"""

APPLICATION_ID = 0x6475636C
"""Marks a file as ours ("ducl")."""

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE owners (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        opened INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE conversations (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        tenant TEXT NOT NULL,
        conversation_id TEXT NOT NULL,
        title TEXT NOT NULL,
        active INTEGER,
        activations INTEGER NOT NULL DEFAULT 0,
        created INTEGER NOT NULL,
        updated INTEGER NOT NULL,
        UNIQUE (tenant, conversation_id)
    ) STRICT;
    CREATE INDEX conversations_changed ON conversations (tenant, updated, id);
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        tenant TEXT NOT NULL,
        run_id TEXT NOT NULL,
        conversation INTEGER NOT NULL,
        state INTEGER NOT NULL,
        activation INTEGER NOT NULL DEFAULT 0,
        pool TEXT NOT NULL,
        kept_from INTEGER NOT NULL DEFAULT 1,
        created INTEGER NOT NULL,
        record BLOB NOT NULL,
        info BLOB NOT NULL,
        UNIQUE (tenant, run_id)
    ) STRICT;
    CREATE INDEX runs_state ON runs (tenant, state);
    CREATE INDEX runs_newest ON runs (tenant, id);
    CREATE INDEX runs_conversation ON runs (conversation, state);
    CREATE TABLE heads (
        run INTEGER PRIMARY KEY,
        version INTEGER NOT NULL,
        last_seq INTEGER NOT NULL,
        epoch INTEGER NOT NULL,
        updated INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE frames (
        id INTEGER PRIMARY KEY,
        run INTEGER NOT NULL,
        first_seq INTEGER NOT NULL,
        last_seq INTEGER NOT NULL,
        epoch INTEGER NOT NULL,
        state INTEGER NOT NULL,
        flags INTEGER NOT NULL,
        body BLOB,
        blob BLOB
    ) STRICT;
    CREATE UNIQUE INDEX frames_order ON frames (run, last_seq);
    CREATE TABLE checkpoints (
        run INTEGER PRIMARY KEY,
        seq INTEGER NOT NULL,
        body BLOB,
        blob BLOB
    ) STRICT;
    CREATE TABLE blobs (
        hash BLOB PRIMARY KEY,
        uses INTEGER NOT NULL,
        body BLOB NOT NULL
    ) STRICT;
    CREATE TABLE messages (
        run INTEGER NOT NULL,
        position INTEGER NOT NULL,
        conversation INTEGER NOT NULL,
        activation INTEGER NOT NULL,
        visible INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (run, position)
    ) STRICT;
    CREATE INDEX messages_order ON messages (conversation, activation, position);
    CREATE TABLE inbox (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        run INTEGER NOT NULL,
        signal_id TEXT NOT NULL,
        body BLOB NOT NULL,
        taken INTEGER NOT NULL DEFAULT 0,
        owner INTEGER NOT NULL,
        UNIQUE (run, signal_id)
    ) STRICT;
    CREATE TABLE requests (
        tenant TEXT NOT NULL,
        request_id TEXT NOT NULL,
        run INTEGER NOT NULL,
        first_seq INTEGER NOT NULL,
        fingerprint TEXT NOT NULL,
        PRIMARY KEY (tenant, request_id)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX requests_run ON requests (run);
    CREATE TABLE work (
        run INTEGER PRIMARY KEY,
        pool TEXT NOT NULL,
        ready REAL NOT NULL,
        token INTEGER,
        owner INTEGER,
        worker TEXT NOT NULL DEFAULT '',
        deliveries INTEGER NOT NULL DEFAULT 0,
        again INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE INDEX work_ready ON work (pool, ready);
    CREATE INDEX work_token ON work (token);
    CREATE TABLE timers (
        at REAL NOT NULL,
        run INTEGER NOT NULL,
        PRIMARY KEY (at, run)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX timers_run ON timers (run);
    CREATE TABLE settings (
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        value BLOB NOT NULL,
        revision INTEGER NOT NULL,
        PRIMARY KEY (tenant, name)
    ) STRICT, WITHOUT ROWID;
    """,
    """
    ALTER TABLE messages ADD COLUMN scope TEXT NOT NULL DEFAULT '';
    CREATE TABLE answers (
        run INTEGER NOT NULL,
        interrupt_id TEXT NOT NULL,
        PRIMARY KEY (run, interrupt_id)
    ) STRICT, WITHOUT ROWID;
    """,
    """
    ALTER TABLE runs ADD COLUMN rested INTEGER;
    UPDATE runs SET rested = (SELECT updated FROM heads WHERE heads.run = runs.id) WHERE state IN (4, 5, 6);
    CREATE INDEX runs_rested ON runs (rested) WHERE rested IS NOT NULL;
    ALTER TABLE work ADD COLUMN lease REAL NOT NULL DEFAULT 30;
    ALTER TABLE work ADD COLUMN warned INTEGER NOT NULL DEFAULT 0;
    """,
)

VERSION = len(MIGRATIONS)
"""The version of files this code writes; higher ones are refused."""
