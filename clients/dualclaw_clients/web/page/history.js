// What was said in a conversation so far, whole, over all pages.

import { call } from "./stream.js";

// Messages and runs, the oldest first. How runs ended is an extra: without it there are the messages alone.
export async function readHistory(id) {
  const conversation = encodeURIComponent(id);
  const [messages, runs] = await Promise.all([
    allPages(`/v1/conversations/${conversation}/messages?`, "messages"),
    allPages(`/v1/runs?conversation_id=${conversation}&`, "runs").catch(() => []),
  ]);
  return { messages, runs: runs.reverse() };
}

async function allPages(path, name) {
  const found = [];
  let token = "";
  do {
    const page = await call("GET", `${path}page_size=500&page_token=${encodeURIComponent(token)}`);
    found.push(...page[name]);
    token = page.next_page_token;
  } while (token);
  return found;
}
