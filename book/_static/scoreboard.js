// Filters of the scoreboard, by paper and by verdict. The page is whole without this script: it only hides rows.
// The choice stands in the address (?paper=nqf&verdict=open), so a filtered view can be linked.
document.addEventListener("DOMContentLoaded", () => {
  const board = document.querySelector(".claim-scoreboard");
  if (!board) return;

  const badges = [...board.querySelectorAll(".claim-verdict[data-verdict]")];
  const rows = badges.map((badge) => ({ ...badge.dataset, row: badge.closest("tr") })).filter(({ row }) => row);
  const papers = { nqf: "Neural Quadratic Forms", quadratic: "A Defense of the Quadratic Model", ours: "Our own" };

  const form = document.createElement("form");
  form.className = "claim-filters";
  form.setAttribute("role", "search");
  form.setAttribute("aria-label", "Filter the claims");
  const paper = select("paper", "Paper", [...new Set(rows.map((r) => r.paper))], (key) => papers[key] || key);
  const verdict = select("verdict", "Verdict", [...new Set(rows.map((r) => r.verdict))], (key) => key);
  const shown = document.createElement("output");
  shown.setAttribute("aria-live", "polite");
  form.append(shown);

  // After the table of counts, before the first table of claims.
  const first = board.querySelector("h2.claim-paper, .claim-group");
  board.insertBefore(form, first);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => {
    apply();
    remember();
  });
  window.addEventListener("hashchange", reveal);
  apply();
  reveal();

  function select(name, text, keys, title) {
    const label = document.createElement("label");
    const field = document.createElement("select");
    field.name = name;
    field.append(new Option("all", ""), ...keys.map((key) => new Option(title(key), key)));
    const wanted = new URLSearchParams(location.search).get(name);
    if (keys.includes(wanted)) field.value = wanted;
    label.append(`${text} `, field);
    form.append(label);
    return field;
  }

  function apply() {
    let count = 0;
    for (const entry of rows) {
      const fits = (key, field) => !field.value || entry[key] === field.value;
      entry.row.hidden = !(fits("paper", paper) && fits("verdict", verdict));
      count += entry.row.hidden ? 0 : 1;
    }
    shown.textContent = `${count} of ${rows.length} claims`;
    for (const group of board.querySelectorAll(".claim-group")) {
      group.hidden = ![...group.querySelectorAll("tbody tr")].some((row) => !row.hidden);
    }
    for (const heading of board.querySelectorAll("h2.claim-paper")) {
      let next = heading.nextElementSibling;
      let empty = true;
      for (; next && !next.matches("h2.claim-paper"); next = next.nextElementSibling) empty = empty && next.hidden;
      heading.hidden = empty;
    }
  }

  function remember() {
    const query = new URLSearchParams();
    for (const field of [paper, verdict]) if (field.value) query.set(field.name, field.value);
    try {
      history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}`);
    } catch {
      // Some browsers refuse to change the address of a file on disk; the filter works all the same.
    }
  }

  // A link from a page to a claim that is filtered away clears the filter rather than leading nowhere.
  function reveal() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const row = target && target.closest("tr");
    if (row && row.hidden) {
      paper.value = verdict.value = "";
      apply();
      target.scrollIntoView();
    }
  }
});
