// An original front-end, as it was before there were rewinds and questions: it reads `data: ` lines, knows five types,
// appends text as it comes, and shows the content of `done` instead when that comes. Anything else is a fault.
//
// usage: node old_front_end.mjs URL BODY [BEARER]  -> one line of JSON: what is shown, after each frame; then "over"
//        node old_front_end.mjs < frames.json      -> one line: what each of these frames shows on a fresh page

class Page {
  steps = {};   // by index, which may be any number
  shown = { text: "", reasoning: "", steps: [], error: "", done: false, conversation: "", trace: "", generating: false };

  take(event) {
    const { shown } = this;
    switch (event.type) {
      case "delta":
        shown.text += event.content;
        break;
      case "reasoning":
        shown.reasoning += event.content;
        break;
      case "step":
        this.steps[event.index ?? Object.keys(this.steps).length] = view(event.step);
        shown.steps = Object.values(this.steps);
        break;
      case "done":
        shown.text = event.content;
        shown.steps = event.process_steps.map(view);
        shown.conversation = event.conversation_id;
        shown.generating = event.generating;
        shown.trace = event.trace_id ?? "";
        shown.done = true;
        break;
      case "error":
        shown.error = event.message;
        shown.trace = event.trace_id ?? "";
        shown.done = true;
        break;
      default:
        throw new Error(`no event of ours: ${event.type}`);
    }
    return event.type;
  }
}

// An empty result is what it takes for "still at work".
function view(step) {
  return { name: step.name ?? step.text, running: step.type !== "thinking" && step.result === "", says: step.diagnosis?.summary ?? "", hint: step.diagnosis?.hint ?? "" };
}

function* events(lines) {
  for (const line of lines) {
    if (line === "") continue;
    if (!line.startsWith("data: ")) throw new Error(`no line of ours: ${line}`);
    yield JSON.parse(line.slice(6));
  }
}

async function follow(url, body, key) {
  const page = new Page();
  const response = await fetch(url, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) },
    body,
  });
  if (response.status !== 200) throw new Error(`status ${response.status}`);
  const decoder = new TextDecoder();
  let rest = "";
  for await (const piece of response.body) {
    const lines = (rest + decoder.decode(piece, { stream: true })).split("\n");
    rest = lines.pop();
    for (const event of events(lines)) process.stdout.write(`${JSON.stringify({ type: page.take(event), ...page.shown })}\n`);
  }
  if (rest) throw new Error(`half a frame at the end: ${rest}`);
  process.stdout.write('"over"\n');
}

async function show() {
  let text = "";
  for await (const piece of process.stdin) text += piece;
  const shown = JSON.parse(text).map((frame) => {
    const page = new Page();
    for (const event of events(frame.split("\n"))) page.take(event);
    return page.shown;
  });
  process.stdout.write(`${JSON.stringify(shown)}\n`);
}

await (process.argv.length > 2 ? follow(...process.argv.slice(2)) : show());
