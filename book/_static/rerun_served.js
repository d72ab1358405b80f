// "Run again" in the box "Rerun this page", where nqflib.serve shows the book: starts a run, follows it, and sets its
// figures beside the published ones. Everything from the server becomes text of the page, never markup.
const RerunServed = {
  async offer(box, form) {
    const book = new URL(document.documentElement.dataset.content_root || "./", location.href);
    if (!/^https?:$/.test(book.protocol) || !book.pathname.endsWith("/book/")) return;
    const api = new URL("../nqf/api/", book);
    let ping;
    try {
      ping = await (await fetch(new URL("ping", api))).json();
    } catch {
      return; // a static copy below a folder of that name
    }
    if (ping.name === "nqf") RerunServed.start(box, form, api);
  },

  start(box, form, api) {
    const { element } = Nodes;
    const run = element("button", { type: "button", class: "nqf-run" }, "Run again");
    const cancel = element("button", { type: "button", hidden: "" }, "Cancel");
    const list = element("a", { href: new URL("../pages/my_runs.html", api) }, "My runs");
    form.buttons.prepend(run, cancel);
    form.buttons.append(list);
    const status = element("p", { class: "nqf-status", role: "status" });
    const bar = element("progress", { max: "1", "aria-label": "Progress of the run", hidden: "" });
    const outcome = element("div", { class: "nqf-outcome" });
    box.append(bar, status, outcome);
    let followed = null; // the id of the run that the page shows

    run.addEventListener("click", async () => {
      const given = form.given();
      if (!given) {
        say("Correct the marked parameter first.");
        box.querySelector("[aria-invalid]").focus();
        return;
      }
      clear();
      await attempt(async () => follow(await ask("runs", "POST", { page: form.page, parameters: given })));
    });
    cancel.addEventListener("click", () => attempt(() => ask(`runs/${followed}/cancel`, "POST")));
    form.changed.addEventListener("edit", () => {
      run.disabled = form.given() === null;
    });
    form.changed.addEventListener("travel", reopen);
    reopen();

    // The kept run that the address names, by its id or by its parameters.
    function reopen() {
      const asked = new URLSearchParams(location.search);
      clear();
      attempt(async () => {
        if (asked.has("run")) {
          const kept = await ask(`runs/${encodeURIComponent(asked.get("run"))}`);
          const address = new URL(location.href);
          address.searchParams.delete("run");
          history.replaceState(null, "", address);
          form.show(kept.given);
          await follow(kept);
          return;
        }
        const { runs } = await ask(`runs?page=${encodeURIComponent(form.page)}`);
        const given = sorted(form.given());
        const kept = runs.find((other) => ["queued", "running", "done"].includes(other.state) && sorted(other.given) === given);
        if (kept && (kept.state !== "done" || asked.size)) await follow(kept);
      });
    }

    async function follow(started) {
      followed = started.id;
      let now = started;
      while (followed === started.id && ["queued", "running"].includes(now.state)) {
        cancel.hidden = false;
        tell(now);
        await new Promise((resolve) => setTimeout(resolve, 400));
        now = await ask(`runs/${started.id}`);
      }
      if (followed !== started.id) return;
      cancel.hidden = true;
      bar.hidden = true;
      if (now.state === "done") show(now.result ? now : await ask(`runs/${started.id}`));
      else {
        say(`The run ${now.state === "failed" ? "failed" : `was ${now.state}`}.`);
        if (now.message) outcome.append(element("pre", { class: "nqf-message", tabindex: "0" }, now.message));
      }
    }

    function tell(now) {
      bar.hidden = false;
      const [cell, cells] = now.cells.split(" ").map(Number);
      if (cells) bar.value = (cell - 1) / cells;
      else bar.removeAttribute("value");
      if (now.state === "queued") say(now.ahead ? `Waiting; ${now.ahead} before it.` : "Waiting.");
      else say(`Running ${now.name}: ${cells ? `cell ${cell} of ${cells}` : "starting"}${now.progress ? `, ${now.progress}` : ""}.`);
    }

    function show(done) {
      const { figures, differences, published } = done.result;
      const label = `Your run: ${done.name}`;
      const links = element("ul", { class: "nqf-links" });
      for (const figure of figures) {
        const files = new URL(`runs/${done.id}/files/`, api);
        const yours = drawn(figure, label, files);
        const there = document.getElementById(figure.name);
        if (there?.matches("figure.nqf-figure")) {
          there.classList.add("nqf-compared");
          there.querySelector(".nqf-themes").after(yours);
          const item = element("li");
          item.append(element("a", { href: `#${figure.name}` }, there.querySelector(".caption-number")?.textContent.trim() || figure.name));
          links.append(item);
        } else outcome.append(yours);
      }
      const moved = differences.filter((row) => !row.same).length;
      const compared = published ? `${moved} of ${differences.length} recorded numbers differ from the published ones.` : "There is no published page to compare with.";
      say(`Done in ${Math.max(1, Math.round(done.ended - done.started))} s. ${compared}`);
      if (links.childElementCount) {
        links.prepend(element("li", {}, "Beside the published one:"));
        outcome.prepend(links);
      }
      if (differences.length) outcome.append(table(differences));
      const notebook = element("p", {});
      notebook.append(element("a", { href: new URL(`runs/${done.id}/files/notebook.ipynb`, api) }, "The executed notebook"));
      outcome.append(notebook);
    }

    function drawn(figure, label, files) {
      const yours = element("div", { class: "nqf-yours" });
      const head = element("p", { class: "nqf-yours-label" }, label);
      const address = (file) => `${new URL(file, files)}?v=${Date.now()}`;
      yours.append(head);
      for (const theme of ["light", "dark"]) yours.append(element("img", { src: address(figure[theme]), alt: figure.alt, class: `only-${theme}` }));
      const foot = element("p", { class: "nqf-foot" });
      [figure.png, figure.light, ...figure.csv].forEach((file, i) => {
        foot.append(i ? " · " : "", element("a", { href: new URL(file, files), download: file }, file.split(".").pop().toUpperCase()));
      });
      yours.append(foot);
      return yours;
    }

    function table(differences) {
      const scroll = element("div", { class: "nqf-differences", tabindex: "0", role: "region", "aria-label": "Differences of all recorded numbers" });
      const grid = element("table", { class: "table" });
      const head = element("tr");
      for (const word of ["Quantity", "Published", "Your run", "Difference"]) head.append(element("th", { scope: "col" }, word));
      const body = element("tbody");
      for (const row of [...differences].sort((a, b) => a.same - b.same)) {
        const line = element("tr", row.same ? { class: "nqf-same" } : {});
        line.append(element("th", { scope: "row" }, row.name));
        const step = row.same ? "none" : row.difference === null ? "changed" : short(row.difference);
        for (const text of [short(row.before), short(row.now), step]) line.append(element("td", {}, text));
        body.append(line);
      }
      grid.append(element("thead"), body);
      grid.tHead.append(head);
      scroll.append(grid);
      return scroll;
    }

    // Four digits; the first values of a list.
    function short(value) {
      if (value === null) return "–";
      if (Array.isArray(value)) return value.slice(0, 4).map(short).join(", ") + (value.length > 4 ? `, … (${value.length})` : "");
      if (typeof value !== "number") return RerunForm.literal(value);
      return (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)))).replaceAll("-", "−");
    }

    function clear() {
      followed = null;
      cancel.hidden = bar.hidden = true;
      say("");
      outcome.replaceChildren();
      for (const yours of document.querySelectorAll(".nqf-yours")) yours.remove();
      for (const figure of document.querySelectorAll(".nqf-compared")) figure.classList.remove("nqf-compared");
    }

    function say(text) {
      if (status.textContent !== text) status.textContent = text;
    }

    async function attempt(action) {
      try {
        await action();
      } catch (error) {
        cancel.hidden = bar.hidden = true;
        say(error instanceof TypeError ? "The server does not answer; is `make serve` still running?" : error.message);
      }
    }

    async function ask(what, method = "GET", body = null) {
      const headers = { "X-XSRFToken": document.cookie.match(/(?:^|; )_xsrf=([^;]*)/)?.[1] ?? "" };
      if (body) headers["Content-Type"] = "application/json";
      const answer = await fetch(new URL(what, api), { method, headers, body: body && JSON.stringify(body) });
      const told = await answer.json().catch(() => ({}));
      if (!answer.ok) throw new Error(told.message || `The server answered with status ${answer.status}.`);
      return told;
    }

    function sorted(values) {
      return values && JSON.stringify(Object.entries(values).sort(([a], [b]) => (a < b ? -1 : 1)));
    }
  },
};
