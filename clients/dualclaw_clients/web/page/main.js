// The page: which conversation is shown, what runs in it, and everything around the answers.
//
// The address holds the conversation (#id), so a reload or a shared tab comes back to it, also to a run that is
// still going on: its stored events are replayed and the live ones follow.

import { AgentChoice } from "./agents.js";
import { Announcer } from "./announce.js";
import { readHistory } from "./history.js";
import { ConversationList } from "./list.js";
import { Notices } from "./notices.js";
import { Refusal, RunStream, call, hasKey, randomId, setKey } from "./stream.js";
import { finding } from "./timeline.js";
import { Turn, question as questionBubble, replay } from "./turn.js";

const $ = (id) => document.getElementById(id);
const turns = $("turns"), scroll = $("scroll"), input = $("question"), status = $("status");
const announcer = new Announcer($("told")), notices = new Notices($("notices"));
const state = { conversation: "", stream: null, turn: null, opening: 0, unopened: false, pinned: true };

const agents = new AgentChoice(
  { select: $("agent"), label: $("agent-label"), about: $("about"), tools: $("tools") },
  // What is not a missing key the list of conversations tells, and tries again.
  { onTrouble: (error) => explain(error), onModels: (models) => notices.tellModels(models) },
);

// ---- running

function begin(options) {
  const turn = new Turn(stick, (text) => { if (state.turn === turn) announcer.say(text); });
  turns.append(turn.element);
  turn.setLive(true);
  state.turn = turn;
  $("empty").hidden = true;
  const stream = new RunStream({
    ...options,
    onEvent: (event) => take(stream, turn, event),
    onLink: (up) => {
      if (state.stream !== stream) return;
      say(!up ? "Connection lost, reconnecting" : stream.stopping ? "Stopping" : "", !up);
    },
    onStart: () => started(stream),
  });
  state.stream = stream;
  refreshControls();
  stream.read()
    .catch((error) => {
      if (error.reason === "LOG_COMPACTED" && stream.lastId && state.stream === stream && state.conversation) {
        openConversation(state.conversation);   // its events are gone while this page was away; its messages are not
        return;
      }
      const known = explain(error);
      if (!stream.runId && options.request) takeBack(options.request, known ? turn : null);
      if (!known) turn.fail(sentence(error), { summary: sentence(error), hint: error.hint }, "");
    })
    .finally(() => finish(stream, turn));
}

// From here on the conversation exists: a reload comes back to it, and the list shows it at work.
async function started(stream) {
  try {
    const { run } = await call("GET", `/v1/runs/${encodeURIComponent(stream.runId)}`);
    if (state.stream === stream && !state.conversation) setConversation(run.conversation_id);
  } catch { /* its end tells the conversation too */ }
  list.read();
}

// A question that was refused goes back where it was typed; `turn` is its answer if that has nothing to say.
function takeBack(request, turn) {
  if (!input.value) input.value = request.message.parts[0].text;
  grow();
  if (!turn) return;
  turn.element.previousElementSibling.remove();
  turn.element.remove();
  if (turns.children.length) return;
  $("empty").hidden = false;
  $("title").textContent = "New conversation";
}

function take(stream, turn, event) {
  const parked = turn.parked;
  turn.apply(event);
  if (event.type === "done" && event.conversation_id && state.stream === stream && !state.conversation) {
    setConversation(event.conversation_id);
  }
  if (event.type === "done" && state.turn === turn) {
    if (turn.parked) ask(stream, turn);
    else if (turn.text) announcer.sayNow(`Answer: ${turn.text}`);
  }
  if (turn.parked !== parked) refreshControls();
}

// Shows what the run asks, in the words the engine keeps. Events of the past are replayed after a reload, so the run
// itself says whether it still waits.
async function ask(stream, turn) {
  const asked = stream.lastId;
  for (let pause = 500; state.stream === stream && turn.parked && stream.lastId === asked; pause = Math.min(8000, 2 * pause)) {
    try {
      const { run } = await call("GET", `/v1/runs/${encodeURIComponent(stream.runId)}`);
      if (state.stream !== stream || !turn.parked || stream.lastId !== asked) return;
      if (run.state !== "RUN_STATE_INTERRUPTED") return;
      turn.cards.show(run);
      refreshControls();
      stick();
      return;
    } catch (error) {
      if (explain(error)) return;
    }
    await new Promise((resolve) => { setTimeout(resolve, pause); });
  }
}

function finish(stream, turn) {
  turn.setLive(false);
  if (stream.runId && stream.ended) {
    call("GET", `/v1/runs/${encodeURIComponent(stream.runId)}`)
      .then(({ run }) => {
        turn.setEnding(run);
        if (state.stream === null && state.turn === turn && !state.conversation) setConversation(run.conversation_id);
      })
      .catch(() => {});   // the footer is an extra; the answer is there
  }
  if (state.stream === stream) {
    state.stream = null;
    say("");
    refreshControls();
    list.read();
  }
}

async function send(text) {
  const waiting = state.stream && state.turn.parked ? state.turn.cards.byMessage : null;
  if (waiting) {   // a message answers the one question; the run that asked goes on where it stands
    if (!await waiting.respond(text) && !input.value) input.value = text;
    grow();
    refreshControls();
    return;
  }
  leave();
  turns.append(questionBubble(text));
  state.pinned = true;
  const request = {
    conversation_id: state.conversation,
    request_id: randomId(),
    message: { role: "ROLE_USER", parts: [{ text }] },
  };
  if (agents.chosen) request.agent = agents.chosen;
  if (!state.conversation) $("title").textContent = firstLine(text);
  begin({ request });
}

async function stop() {
  const { stream, turn } = state;
  if (!stream) return;
  if (stream.stopping && !stream.runId) {   // asked twice, and no engine has answered
    turn.fail("Given up before the engine answered. If it got the question, the answer will be in the list.", null, "");
    stream.close();
    return;
  }
  say("Stopping");
  try {
    await stream.stop();
  } catch (error) {
    if (!explain(error)) say(sentence(error), true);
  }
}

function leave() {
  const { stream } = state;
  state.stream = state.turn = null;
  if (stream) stream.close();
  announcer.hush();
  say("");
}

// ---- conversations

const list = new ConversationList($("conversations"), $("older"), {
  onOpen: openConversation,
  onRemoved: (id) => { if (state.conversation === id) fresh(); },
  onTrouble: (error, asked = false) => {
    if (explain(error)) return true;
    if (asked && error instanceof Refusal && error.status < 500) say(sentence(error), true);
    else notices.tellAway(error);
    return false;
  },
  onBack: (wasDown) => {
    notices.tellAway(null);
    if (!wasDown) return;
    agents.read();
    if (state.unopened && state.conversation) openConversation(state.conversation);
  },
});

async function openConversation(id) {
  leave();
  drawer(false);
  const opening = ++state.opening;
  setConversation(id);
  turns.replaceChildren();
  $("empty").hidden = true;
  refreshControls();
  state.unopened = false;
  try {
    const { conversation } = await call("GET", `/v1/conversations/${encodeURIComponent(id)}`);
    let { messages, runs } = await readHistory(id);
    if (opening !== state.opening) return;
    $("title").textContent = conversation.title || "Untitled";
    const runId = conversation.active_run_id;
    // The events of a run that goes on bring everything after its question.
    if (runId) messages = messages.slice(0, messages.findLastIndex((message) => message.role === "ROLE_USER") + 1);
    turns.replaceChildren(...replay(messages, runs));
    state.pinned = true;
    if (runId) begin({ runId });
    requestAnimationFrame(stick);
  } catch (error) {
    if (opening === state.opening) {
      state.unopened = true;
      if (!explain(error)) {
        const box = finding({ severity: "error", summary: "This conversation cannot be shown", detail: sentence(error) });
        box.setAttribute("role", "alert");
        turns.replaceChildren(box);
      }
    }
  }
  focusInput();
}

function fresh() {
  leave();
  drawer(false);
  state.opening += 1;
  setConversation("");
  turns.replaceChildren();
  $("title").textContent = "New conversation";
  $("empty").hidden = false;
  refreshControls();
  input.focus();
}

function setConversation(id) {
  state.conversation = id;
  history.replaceState(null, "", id ? `#${encodeURIComponent(id)}` : location.pathname);
  list.mark(id);
}

function conversationOfAddress() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";   // no address of ours
  }
}

// ---- small things

function say(text, trouble = false) {
  status.textContent = text;
  status.classList.toggle("trouble", trouble);
}

// Handles what the whole page answers to: a missing key. True when it did.
function explain(error) {
  if (!(error instanceof Refusal) || error.status !== 401) return false;
  $("login-refused").hidden = !hasKey();
  if (!$("login").open) $("login").showModal();
  return true;
}

function sentence(error) {
  return error instanceof TypeError ? "The gateway cannot be reached." : error.message;
}

function refreshControls() {
  const parked = Boolean(state.stream && state.turn && state.turn.parked);
  const running = Boolean(state.stream) && !parked;
  // An approval is given on its card, never by a message; what is typed meanwhile stays.
  const blocked = parked && !state.turn.cards.byMessage;
  const focused = document.activeElement;
  $("stop").hidden = !state.stream;
  $("send").hidden = running;
  $("send").disabled = running || blocked || !input.value.trim();
  input.placeholder = blocked ? "Decide above first" : parked ? "Your answer" : "Ask anything";
  // A button that disappears under the hand that pressed it would leave the keyboard nowhere.
  if ([$("stop"), $("send")].includes(focused) && (focused.hidden || focused.disabled)) focusInput(scroll);
}

// On a touch screen focus in a text field opens the keyboard, so there it goes elsewhere, or stays.
function focusInput(elsewhere = null) {
  const target = matchMedia("(pointer: coarse)").matches ? elsewhere : input;
  if (target) target.focus({ preventScroll: true });
}

function stick() {
  if (state.pinned) scroll.scrollTop = scroll.scrollHeight;
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

function drawer(shown) {
  const sidebar = $("sidebar");
  if (sidebar.classList.contains("shown") === shown) return;
  const inside = sidebar.contains(document.activeElement);
  sidebar.classList.add("slides");
  sidebar.classList.toggle("shown", shown);
  $("menu").setAttribute("aria-expanded", String(shown));
  $("shade").hidden = !shown;
  $("main").inert = shown;
  if (shown) $("new").focus();
  else if (inside) $("menu").focus();
}

function firstLine(text) {
  return text.trim().split("\n")[0].slice(0, 200);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = input.value.trim();
  if (!text || $("send").disabled || $("send").hidden) return;
  input.value = "";
  grow();
  send(text);
});
input.addEventListener("input", () => { grow(); refreshControls(); });
input.addEventListener("keydown", (event) => {
  // While an input method composes (Chinese, Japanese, ...), Enter chooses a word.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
// Only scrolling up lets go of the end: scroll events come late, when more text has already made the page longer.
let lastTop = 0;
scroll.addEventListener("scroll", () => {
  if (scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60) state.pinned = true;
  else if (scroll.scrollTop < lastTop - 2) state.pinned = false;
  lastTop = scroll.scrollTop;
}, { passive: true });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") drawer(false); });
// A window that gets smaller, or a composer that grows, must not hide the end that was in view.
new ResizeObserver(stick).observe(scroll);
matchMedia("(max-width: 760px)").addEventListener("change", () => {
  drawer(false);
  $("sidebar").classList.remove("slides");
});
// Not by its address: that is the conversation's place.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  input.focus();
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", fresh);
$("menu").addEventListener("click", () => drawer(!$("sidebar").classList.contains("shown")));
$("shade").addEventListener("click", () => drawer(false));
$("login-form").addEventListener("submit", () => {
  setKey($("key").value.trim());
  $("key").value = "";
  start();
});
window.addEventListener("hashchange", () => {
  const id = conversationOfAddress();
  if (id !== state.conversation) (id ? openConversation(id) : fresh());
});

function start() {
  agents.read();
  list.read();
  const id = conversationOfAddress();
  if (id) openConversation(id);
  else focusInput();
}

start();
