// The list of runs; everything from the server becomes text, never markup.
const api = new URL("../api/", location.href);
const body = document.getElementById("runs");
const status_ = document.getElementById("status");
let shown = "";

// The theme that the reader chose in the book, else that of the system.
const chosen = localStorage.getItem("theme");
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = ["light", "dark"].includes(chosen) ? chosen : dark ? "dark" : "light";

function element(name, attributes = {}, text = "") {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

async function ask(what, method = "GET") {
  const headers = { "X-XSRFToken": document.cookie.match(/(?:^|; )_xsrf=([^;]*)/)?.[1] ?? "" };
  const answer = await fetch(new URL(what, api), { method, headers });
  const told = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(told.message || `The server answered with status ${answer.status}.`);
  return told;
}

function say(text) {
  if (status_.textContent !== text) status_.textContent = text;
}

async function refresh() {
  try {
    const { runs } = await ask("runs");
    const now = JSON.stringify(runs);
    if (now !== shown) {
      shown = now;
      const focused = document.activeElement?.dataset?.focus;
      body.replaceChildren(...runs.map(row));
      if (focused) document.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
    }
    say(runs.length === 1 ? "One run." : `${runs.length} runs.`);
  } catch (error) {
    say(error instanceof TypeError ? "The server does not answer; is `make serve` still running?" : error.message);
  }
}

function row(run) {
  const line = element("tr");
  const page = element("td");
  page.append(element("a", { href: `../../book/notebooks/${run.page}.html?run=${run.id}`, "data-focus": `page ${run.id}` }, run.page));
  const state = element("td", {}, run.state);
  if (run.state === "running" && run.progress) state.append(element("small", {}, run.progress));
  if (run.message) state.append(element("small", {}, run.message.slice(-300)));
  const when = element("td", {}, new Date(1000 * (run.started ?? run.created)).toLocaleString());
  if (run.started && run.ended) when.append(element("small", {}, `took ${Math.max(1, Math.round(run.ended - run.started))} s`));
  const command = element("td");
  command.append(element("code", {}, run.command));
  const actions = element("td");
  if (["queued", "running"].includes(run.state)) actions.append(button("Cancel", run, () => ask(`runs/${run.id}/cancel`, "POST")));
  else actions.append(button("Delete", run, () => ask(`runs/${run.id}`, "DELETE")));
  actions.append(button("Copy command", run, () => copy(run.command)));
  line.append(page, element("td", {}, run.name), state, when, command, actions);
  return line;
}

function button(text, run, action) {
  const node = element("button", { type: "button", "aria-label": `${text}: ${run.page}, ${run.name}`, "data-focus": `${text} ${run.id}` }, text);
  node.addEventListener("click", async () => {
    try {
      await action();
    } catch (error) {
      say(error.message);
      return;
    }
    await refresh();
  });
  return node;
}

async function copy(text) {
  await navigator.clipboard.writeText(text);
}

refresh();
setInterval(refresh, 1500);
